"""CriticalKV against its two stages in NumPy: the score, and the positions retained, also where heads compete."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import ProjectedValues, Protect, SquaredNorms
from kvjax.policies import PRESETS, adakv, criticalkv, dynamickv, h2o, snapkv
from kvjax.policy import Moment
from tests import tiny
from tests.methods.literal_budgets import adaptive, algorithm_1, best, projected, two_stages
from tests.methods.literal_budgets import snapkv as snapkv_scores
from tests.methods.reference import Reader
from tests.policy.small import small
from tests.products import each_once, part

B, H, G, M, D, E = 3, 2, 3, 80, 4, 12
KEYS = SquaredNorms("key")  # not negative, and of no norm of the value


def drawn(group=G):
    """Rows of different lengths with capacities of their own, in any order of slots, and an output projection."""
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(B, H, M, D)).astype(np.float32) for _ in range(2))
    positions = np.full((B, H, M), -1)
    for b, length in enumerate((80, 50, 9)):
        for h in range(H):
            positions[b, h, rng.permutation(M)[:length]] = rng.permutation(length)
    capacity = np.array([[30, 31], [20, 12], [12, 40]])
    output = rng.normal(size=(H * group, D, E)).astype(np.float32)
    return Slots(*map(jnp.asarray, (keys, values, positions, capacity))), jnp.asarray(output)


def moment(output, counts, protected=None, heads=ALL_HEADS):
    layer = AttentionLayer(0, Rope(1e4), None, 1.0, output)
    return Moment(jnp.full(B, M), layer, heads=heads, protected=protected, counts=counts)


@partial(jax.jit, static_argnames="score")
def scored(score, entries, output, protected):
    """With counts, without them, and what the base alone says."""
    compared = moment(output, None, protected)
    base = KEYS(entries, moment(output, None))
    return score(entries, moment(output, entries.capacity, protected)), score(entries, compared), base


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("first", "group"), each_once([0.5, 0.0, 0.9], [G, 1]))
def test_two_stages(first, group):
    entries, output = drawn(group)
    protected = Protect(recent=4).mask(entries.positions, jnp.array([80, 50, 9]), entries.capacity)
    score = ProjectedValues(KEYS, first, 0.01)
    scores, compared, base = map(np.asarray, scored(score, entries, output, protected))
    np.testing.assert_array_equal(compared, base, "while heads are compared")
    for b, h in np.ndindex(B, H):
        there = np.flatnonzero(entries.positions[b, h] >= 0)
        value, weights = np.asarray(entries.values[b, h, there], np.float64), np.asarray(output, np.float64)
        norms = np.mean([np.abs(value @ weights[h * group + g]).sum(axis=-1) for g in range(group)], axis=0)
        weighed = (base[b, h, there] + 0.01) * norms
        order = np.argsort(-np.where(protected[b, h, there], np.inf, base[b, h, there]), kind="stable")
        chosen = order[: min(int(first * entries.capacity[b, h] + 1e-4), len(there))]
        rest = np.setdiff1d(np.arange(len(there)), chosen)
        got = scores[b, h, there]
        np.testing.assert_allclose(got[rest], weighed[rest], rtol=1e-5)
        if len(chosen) and len(rest):
            assert got[chosen].min() > got[rest].max()


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_devices_that_share_a_kv_head_score_alike():
    entries, output = drawn(group=4)
    mesh = jax.make_mesh((2, 4), ("model", "replica"), axis_types=(AxisType.Auto,) * 2)
    by_kv, by_query = PartitionSpec(None, "model"), PartitionSpec(("model", "replica"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(by_kv, by_query), out_specs=by_kv, check_vma=False)
    def score(entries, output):
        heads = Heads("model", "replica")
        return ProjectedValues(KEYS)(entries, moment(output, entries.capacity, heads=heads))

    expected = ProjectedValues(KEYS)(entries, moment(output, entries.capacity))
    np.testing.assert_allclose(score(entries, output), expected, rtol=1e-5)


ROWS = [np.random.default_rng(9).integers(0, tiny.VOCAB, n) for n in (30, 10, 21)]
PARAMS = tiny.decoder(8, 4, (None,) * 2)
BUDGET, WINDOW = 12, 4
BASE = snapkv(BUDGET, window=WINDOW, kernel=3, pool="avg")


@cache
def of_row(b):
    """SnapKV's scores [L, H, N] of a row, +inf for the window, and the mean norms of its projected values."""
    text = Reader(PARAMS)
    text.read(ROWS[b])
    return snapkv_scores(text, WINDOW, "avg", 3), projected(PARAMS, text.values(), order=1).mean(axis=2)


def counts_of(policy, scores):
    """How many entries each head retains by the base's scores."""
    if policy == "each":
        return np.full(scores.shape[:2], BUDGET)
    if policy == "dynamickv":
        if scores.shape[2] <= BUDGET:
            return np.full(scores.shape[:2], BUDGET)
        buffers = algorithm_1(scores[..., :-WINDOW], BUDGET - WINDOW, 4, 10)
        return np.array([[WINDOW + len(own) for own in layer] for layer in buffers])
    return np.array([adaptive(own, BUDGET) for own in scores])


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("policy", "first"),
    part(product(["each", "dynamickv", "adakv"], [0.0, 0.5, 0.8]), [("each", 0.8), ("dynamickv", 0.0), ("adakv", 0.5)]),
)
def test_heads_retain_both_stages_of_what_the_base_gives_them(policy, first):
    """Layers and heads compete by the base's scores; the second stage changes which entries stay, and not how many."""
    made = criticalkv(BASE, first)
    if policy == "dynamickv":
        made = criticalkv(dynamickv(BUDGET, window=WINDOW, kernel=3), first)
    elif policy == "adakv":
        made = adakv(made)
        assert made == criticalkv(adakv(BASE), first), "in whichever order they are named"
    _, filled = tiny.prefill(PARAMS, made, ROWS, 32)
    for b in range(len(ROWS)):
        scores, norms = of_row(b)
        counts = counts_of(policy, scores)
        expected = two_stages(scores, norms, counts, first)
        assert tiny.held(filled, b) == expected
    scores, norms = of_row(0)
    assert two_stages(scores, norms, counts_of(policy, scores), first) != best(scores, counts_of(policy, scores))


def critical_ada_kv_press(scores, norms, kept, alpha, first, epsilon):
    """The positions [H] that kvpress 0.5.5's CriticalAdaKVPress does not mask, of scores [H, N] in which the window is
    the largest; `kept` is of the mean head.
    """
    H, N = scores.shape
    scores, most = scores.astype(np.float64), np.finfo(np.float64).max

    def top(x, count):
        return np.argsort(-x, axis=-1, kind="stable")[..., :count]

    np.put_along_axis(scores, top(scores, max(1, int(kept * alpha))), most, axis=-1)
    budgets = np.bincount(top(scores.reshape(-1), kept * H) // N, minlength=H)
    for h, budget in enumerate(budgets):
        scores[h, top(scores[h], int(budget * first))] = most
    with np.errstate(over="ignore"):
        scores = (scores + epsilon) * norms
    for h, budget in enumerate(budgets):
        scores[h, top(scores[h], budget)] = most
    masked = top(-scores.reshape(-1), H * (N - kept))
    return [sorted(set(range(N)) - set((masked[masked // N == h] % N).tolist())) for h in range(H)]


@pytest.mark.slow
def test_critical_ada_kv_is_kvpress_s():
    """With safe entries that each head's first stage covers, as all are here: see the module's differences."""
    alpha, first = 0.1, 0.5
    policy = adakv(criticalkv(BASE, first), alpha, formula="kvpress")
    for b in (0, 2):
        _, filled = tiny.prefill(PARAMS, policy, [ROWS[b]], 32)
        scores, norms = of_row(b)
        largest = np.where(np.isinf(scores), scores[np.isfinite(scores)].max() + 1, scores)
        expected = [
            critical_ada_kv_press(own, norm, BUDGET, alpha, first, 1e-4)
            for own, norm in zip(largest, norms, strict=True)
        ]
        sizes = [[len(head) for head in layer] for layer in expected]
        assert min(map(min, sizes)) * first >= max(1, int(BUDGET * alpha))
        assert len({size for layer in sizes for size in layer}) > 2, "or heads did not compete"
        assert tiny.held(filled, 0) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "recent", "every"), [(10, 2, 1), (24, 4, 12)])
def test_a_base_that_evicts_while_decoding(budget, recent, every):
    """Of the entries that remain, half are by the base's scores of that step, half by the product: 4 of 9, 6 of 12."""
    base, remain = h2o(budget, recent=recent, every=every), budget - every
    params = tiny.decoder(4, 2)
    _, filled = tiny.prefill(params, criticalkv(base), [ROWS[0]], 32)
    for token in (3, 9, 27, 14):
        layer = filled.entries.layer(0, budget)
        scores, positions = np.asarray(layer.per_slot[0], np.float64), np.asarray(layer.positions[0])
        order = np.argsort(np.where(positions < 0, 99, positions), axis=-1)
        held = [positions[h, order[h, : sum(positions[h] >= 0)]] for h in range(2)]
        scores, positions = (np.take_along_axis(x, order, axis=-1) for x in (scores, positions))
        values = np.take_along_axis(np.asarray(layer.values[0], np.float64), order[..., None], axis=1)
        norms = projected(params, values[None], order=1).mean(axis=2)
        next_position = positions.max() + 1
        scores[positions >= next_position - recent] = np.inf
        if len(held[0]) == budget:
            kept = two_stages(scores[None], norms, np.full((1, 2), remain))[0]
            assert kept != best(scores[None], np.full((1, 2), remain))[0] or every == 1
            held = [positions[h, own] for h, own in enumerate(kept)]
        _, filled = tiny.step(params, filled, np.array([token]), np.ones(1, bool))
        assert tiny.held(filled, 0) == [[sorted([*own.tolist(), next_position]) for own in held]]


def test_what_the_base_refuses_is_refused():
    policy = criticalkv()
    for change, says in (
        ({"every": 1}, r"Pooling\(.*every=1"),
        ({"protect": Protect()}, "^ProjectedValues: it scores the entries older than its window of 32"),
    ):
        with pytest.raises(ValueError, match=says):
            replace(policy, **change)


REFUSED = {
    "already multiplies scores by value norms": (
        *("capkv", "compactor", "criticalkv", "cur", "defensivekv", "expected_attention", "expected_attention_stats"),
        *("kvgrad", "non_causal_attention", "restkv"),
    ),
    "gives scores that may be negative": (
        *("gkv", "keydiff", "keydiff_codes", "knorm", "kvzap", "qfilter", "rkv", "scissorhands", "simlayerkv"),
        *("triattention", "vase"),
    ),
    "of which only the order means something": (
        *("duo_attention", "epikv", "fastgen", "full", "lacache", "lagkv", "random", "streaming_llm"),
    ),
    "choose a base whose heads differ": ("tova",),
    "scores what a head retains above all others": ("blockwise",),
    "it takes scores for accumulated attention": ("cam",),
    "compares means of scores": ("chunkkv", "entropy_gated_chunkkv"),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_which_bases_are_refused(preset):
    """All others are accepted, and `cur` of keys alone, whose score knows no value."""
    reasons = [reason for reason, presets in REFUSED.items() if preset in presets]
    if not reasons:
        criticalkv(small(preset))
        return
    with pytest.raises(ValueError, match=reasons[0]):
        criticalkv(small(preset))
    if preset == "cur":
        for kind in ("key", "value", "mean"):
            base = replace(small(preset), score=SquaredNorms(kind))
            assert ("weighs_values" in base.score.needs.marks) == (kind != "key")
        criticalkv(replace(small(preset), score=KEYS))
