"""Segments of a pool act like layers of slots, and take the bytes that follow from the total budget."""

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import UNLIMITED, Segments, Usage
from kvjax.pallas_kernels import PAGE, top_counts
from kvjax.parts import CompositeShares, Fixed, Fraction, GlobalShares
from kvjax.policy import AllocatedBudget, Budget, Layout, Moment, Policy
from tests.tiny import decoder, held, prefill

RNG = np.random.default_rng(2)
ROWS = [RNG.integers(0, 64, n).tolist() for n in (40, 61, 7)]
NEW = 14
HEADS, LAYERS = 4, 2
SNAPKV, MORPHKV = "snapkv:budget=24,window=4", "morphkv:budget=24,window=4,every=4"
QUANTIZED = "quantize:policy=morphkv,policy.budget=24,policy.window=4,bits=8"


@dataclass(frozen=True)
class Even(AllocatedBudget):
    """Every head retains the mean, as under a budget that is known beforehand, but in segments."""

    budget: Budget
    groups: int | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.groups)

    def allocate(self, scores, means, least, heads):
        return jnp.broadcast_to(means[..., None], scores.shape[:3])


def params(windows=(None,) * LAYERS):
    return decoder(2 * HEADS, HEADS, windows)


ONE_LAYER = (None,)  # suffices where layers do not compete
WINDOWED = (None, 16)


def segments(cache) -> list[list[list[list[int]]]]:
    """Positions held, ascending, by row, layer and head."""
    starts, used, positions = (np.asarray(getattr(cache.entries, name)) for name in ("start", "used", "positions"))
    layers, rows, heads = starts.shape
    J = heads // cache.entries.lanes

    def of(b, i, h):
        own = positions[b, h // J, starts[i, b, h] :][: used[i, b, h]]
        return sorted(own[own >= 0].tolist())

    return [[[of(b, i, h) for h in range(heads)] for i in range(layers)] for b in range(rows)]


def on(budget: AllocatedBudget, text: str) -> Policy:
    return replace(policies.parse(text), budget=budget)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("text", "groups", "windows"),
    [
        (SNAPKV, 1, ONE_LAYER),
        (MORPHKV, 2, WINDOWED),
        (SNAPKV, 2, WINDOWED),
        ("cam:budget=24,tokens=4", 1, ONE_LAYER),
        ("keyformer:budget=24,recent=8", None, ONE_LAYER),
        (QUANTIZED, 2, ONE_LAYER),
        pytest.param(SNAPKV, None, WINDOWED, marks=pytest.mark.exhaustive),
        pytest.param(MORPHKV, None, WINDOWED, marks=pytest.mark.exhaustive),
        pytest.param("morphkv:budget=24,window=4", None, ONE_LAYER, marks=pytest.mark.exhaustive),
        pytest.param("tova:budget=24", None, ONE_LAYER, marks=pytest.mark.exhaustive),
        pytest.param("morphkv:budget=24,window=4", 1, ONE_LAYER, marks=pytest.mark.exhaustive),
        pytest.param("h2o:budget=24", 2, ONE_LAYER, marks=pytest.mark.exhaustive),
        pytest.param("streaming_llm:budget=24", None, ONE_LAYER, marks=pytest.mark.exhaustive),
        pytest.param("random:budget=24,every=2", 1, ONE_LAYER, marks=pytest.mark.exhaustive),
    ],
)
def test_segments_retain_what_layers_retain(text, groups, windows):
    """With equal counts, segments give the tokens and the entries of layers, to the end of an answer that evicts."""
    model, plain = params(windows), policies.parse(text)
    options = {"max_new_tokens": NEW if windows == ONE_LAYER else 30, "log_probs": True}
    expected = kvjax.generate(model, ROWS, policy=plain, **options)
    answer = kvjax.generate(model, ROWS, policy=on(Even(plain.budget, groups), text), **options)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    atol = 5e-3 if "quantize" in text else 1e-5  # codes that round the other way
    np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=atol, rtol=0)
    assert segments(answer.cache) == [held(expected.cache, row) for row in range(len(ROWS))]


def test_a_step_reads_the_keys_of_a_pool_once(monkeypatch):
    """What entries receive, from the step's query and from queries that leave MorphKV's window, is of one pass."""
    policy = on(Even(Fixed(24)), "morphkv:budget=24,window=8,block=4")
    sizes = {"batch": 2, "length": 40, "new_tokens": NEW}
    model = params(ONE_LAYER)
    cache = kvjax.plan_cache(model.config, policy, dtype="float32", **sizes)
    expected = jax.tree.map(jnp.shape, cache)

    def read_again(*_, **__):
        raise AssertionError("the keys are read again")

    for module in ("kvjax.cache.slots", "kvjax.methods.morphkv"):
        monkeypatch.setattr(import_module(module), "window_scores", read_again)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2,), bool)
    _, extended = jax.eval_shape(import_module("kvjax.reading.layers").step, model, cache, *rows)
    assert jax.tree.map(jnp.shape, extended) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (CompositeShares(Fixed(99)), "snapkv:budget=99,window=4"),
        (GlobalShares(Fixed(99), groups=2), "h2o:budget=99"),
        # Its queries in segments are compared with those in layers above.
        pytest.param(GlobalShares(Fixed(99)), "morphkv:budget=99,window=4", marks=pytest.mark.exhaustive),
    ],
)
def test_a_budget_beyond_the_text_is_full_attention(budget, text):
    model = params(ONE_LAYER)
    answer = kvjax.generate(model, ROWS, policy=on(budget, text), max_new_tokens=NEW, log_probs=True)
    expected = kvjax.generate(model, ROWS, max_new_tokens=NEW, log_probs=True)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=1e-5, rtol=0)


WITHOUT_POOLING = "snapkv:budget=16,window=4,pool=none"
COMPETING = (
    GlobalShares(Fixed(16), groups=1),
    GlobalShares(Fixed(16), groups=2),
    CompositeShares(Fixed(16), first_layer=False),
    CompositeShares(Fixed(16), first_layer=True),
)


@cache
def scores_before() -> np.ndarray:
    """The scores [L, H, N] of the second row by SnapKV without pooling, before anything is dropped."""
    policy = on(COMPETING[0], WITHOUT_POOLING)
    filled = kvjax.prefill(params(), ROWS, policy=policy, compress="never")

    @jax.jit
    def ranked(model, filled):
        moments = [Moment(filled.length, record) for record in model.attention_layers]
        return [policy.rank(layer, moment, None) for moment, layer in zip(moments, filled.entries, strict=True)]

    found = []
    for layer, scores in zip(filled.entries, ranked(params(), filled), strict=True):
        positions = np.asarray(layer.positions)[1, 0]
        order = np.argsort(np.where(positions < 0, 10**6, positions))[: len(ROWS[1])]
        found.append(np.asarray(scores)[1][:, order])
    return np.stack(found)


@cache
def kept_by_each() -> dict[AllocatedBudget, list[list[list[int]]]]:
    """What the second row retains in each layer and head. The prompt is read once."""
    caches = kvjax.prefill_each(params(), ROWS, policies=[on(budget, WITHOUT_POOLING) for budget in COMPETING])
    return {budget: segments(cache)[1] for budget, cache in zip(COMPETING, caches, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_a_global_budget_is_the_best_of_all(groups):
    scores = scores_before()
    kept = kept_by_each()[GlobalShares(Fixed(16), groups=groups)]
    for group in range(groups):
        own = scores[:, group * HEADS // groups : (group + 1) * HEADS // groups]
        best = np.argsort(-own, axis=None, kind="stable")[: 16 * LAYERS * HEADS // groups]
        expected = {tuple(map(int, np.unravel_index(i, own.shape))) for i in best}
        got = {
            (i, h, p) for i in range(LAYERS) for h in range(own.shape[1]) for p in kept[i][h + group * HEADS // groups]
        }
        assert got == expected


@pytest.mark.long
@pytest.mark.parametrize("first_layer", [False, True])
def test_composites_compete_by_their_mean(first_layer):
    scores = scores_before()
    importance = np.flip(np.sort(scores, axis=-1), axis=-1).mean(axis=1)  # [L, N]
    if first_layer:
        importance[0] = importance.max(axis=0)
    best = np.argsort(-importance, axis=None, kind="stable")[: 16 * LAYERS]
    counts = np.bincount(np.unravel_index(best, importance.shape)[0], minlength=LAYERS)
    kept = kept_by_each()[CompositeShares(Fixed(16), first_layer=first_layer)]
    for i, layer in enumerate(kept):
        for h, positions in enumerate(layer):
            assert positions == sorted(np.argsort(-scores[i, h], kind="stable")[: counts[i]].tolist())


def test_floors_come_out_of_the_total():
    policy = on(GlobalShares(Fixed(16), min_tokens=9), "random:budget=16,sinks=0")
    policy = replace(policy, score=policies.parse("knorm:budget=16").score)
    _, cache = prefill(params(), policy, ROWS, 64)
    counts = np.asarray(cache.entries.used)[:, 1]
    assert counts.sum() == 16 * HEADS * LAYERS
    assert counts.min() >= 9
    assert len(set(counts.ravel())) > 1


def test_top_counts_against_a_sort():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (5, 3, 7)).astype(np.float32)
    scores[0, 1] = -np.inf
    scores[1, 0, :2] = np.inf
    totals = np.array([20, 9, 0, 1, 21])
    for row, total, got in zip(scores, totals, np.asarray(jax.jit(top_counts)(scores, totals)), strict=True):
        order = [i for i in np.argsort(-row, axis=None, kind="stable") if np.isfinite(row.flat[i]) or row.flat[i] > 0]
        assert got.tolist() == np.bincount(np.array(order[:total], int) // 7, minlength=3).tolist()


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("groups", "text", "windows"), [(1, SNAPKV, ONE_LAYER), (2, SNAPKV, WINDOWED), (2, MORPHKV, WINDOWED)]
)
def test_bytes_follow_from_the_total(text, groups, windows):
    """Bytes are a closed form, whatever the prompt. With 1,024 slots per head, alignment adds at most 5 %.

    A sliding-window layer counts its window of the budget and has room for its window, others for the answer.
    """
    model, layers, policy = params(windows), len(windows), on(Even(Fixed(24), groups), text)
    cache = kvjax.generate(model, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True).cache
    room = sum(min(64, window or 64) for window in windows) if policy.every is None else 0
    lanes = HEADS if groups is None else groups
    kept = sum(min(24, window or 24) for window in windows)
    rows = math.ceil(HEADS // lanes * (kept + layers * (PAGE - 1) + room) / PAGE) * PAGE
    numbers = 2 * 8 + 1  # keys, values, positions
    if policy.every is not None:
        numbers += 4 // policy.score.block
    expected = 4 * 3 * (lanes * rows * numbers + 4 * HEADS * layers)
    if policy.every is not None:
        expected += 4 * 3 * layers * (2 * HEADS * 4 * (8 + 1) + HEADS * 4)  # the window's queries
    assert cache.nbytes == expected
    plan = kvjax.plan_cache(model.config, policy, batch=3, length=61, new_tokens=NEW, dtype=jnp.float32)
    assert plan.nbytes == cache.nbytes
    assert jax.tree.map(jnp.shape, plan.entries) == jax.tree.map(jnp.shape, cache.entries)
    assert (PAGE - 1) / 1024 <= 0.05


@pytest.mark.parametrize(
    ("policy", "windows", "pages"),
    [
        (on(Even(Fixed(24), 1), SNAPKV), (None, None), 2 * HEADS * LAYERS),
        (on(Even(Fixed(24), 2), SNAPKV), (None, None), HEADS * LAYERS),
        (on(Even(Fixed(24), 2), SNAPKV), (None, PAGE), (2 + 1) * HEADS // 2),
        (on(Even(Fixed(24), 2), SNAPKV), (None, 5 * PAGE), HEADS * LAYERS),
        (on(Even(Fixed(24), 2), MORPHKV), (None, None), 0),
        (policies.duo_attention(((1.0, 0.5, 0.3, 0.4), (0.2, 0.9, 0.1, 0.7)), groups=2), (None, None), 2 * 2),
    ],
)
def test_a_lane_grows_by_room_in_each_segment_that_grows(policy, windows, pages):
    """All if the policy compresses prompts only; of DuoAttention the full heads, two of the four of each lane.

    Two pages for 30 tokens. A segment of a sliding-window layer grows by its window at most.
    """
    plan = kvjax.plan_cache(params(windows).config, policy, batch=2, length=40, new_tokens=NEW, dtype="float32")
    pool, usage = plan.entries.within(40), Usage([40] * LAYERS, [5] * LAYERS)
    assert pool.growth(usage, (5, 5), windows=windows) is None
    size = pool.growth(usage, (35, 35), windows=windows)
    grown = jax.eval_shape(lambda pool: pool.grow(size), pool)
    assert grown.positions.shape[2] - pool.positions.shape[2] == pages * PAGE
    assert grown.longest == pool.longest + 2 * PAGE


@pytest.mark.parametrize("policy", [policies.parse("h2o:budget=24"), on(Even(Fixed(24)), "h2o:budget=24")])
def test_an_entry_takes_over_no_state(policy):
    """In slots and in a pool: what has been written has received nothing, whatever its slot held."""
    plan = kvjax.plan_cache(params(ONE_LAYER).config, policy, batch=2, length=40, new_tokens=NEW, dtype="float32")
    before = jax.tree.map(lambda x: jnp.full(x.shape, 1, x.dtype), plan.entries)  # a segment is one row of its lane
    new = jnp.zeros((2, HEADS, 8))
    after = jax.jit(lambda held: held.write(0, jnp.zeros((2, HEADS), int), new, new, jnp.full((2, HEADS), 5)))(before)
    held = after if isinstance(after, Segments) else after[0]
    assert (held.positions == 5).sum() == 2 * HEADS
    np.testing.assert_array_equal(held.per_slot, np.where(held.positions == 5, 0, 1))


def test_usage_by_hand():
    """Of two heads that grow, with 40 and 30 of 96 slots used, one with 48 slots, and one with a window of 48."""
    policy = on(Even(Fixed(24)), SNAPKV)
    plan = kvjax.plan_cache(params(ONE_LAYER).config, policy, batch=1, length=40, new_tokens=NEW, dtype="float32")
    size, used, capacity = [96, 96, 48, 48], [40, 30, 20, 48], [UNLIMITED, UNLIMITED, 48, 48]
    heads = {"size": size, "used": used, "capacity": capacity}
    pool = replace(plan.entries, **{name: (jnp.array([x]),) for name, x in heads.items()})
    usage = pool.usage()
    assert (usage.occupied.tolist(), usage.free.tolist()) == ([[48]], [[56]])
    assert pool.held().tolist() == [[34.5]]


@pytest.mark.slow
def test_other_budgets_compile_nothing(compiled):
    policy, model = on(GlobalShares(Fixed(24)), SNAPKV), params(ONE_LAYER)
    one = kvjax.generate(model, ROWS, policy=policy, max_new_tokens=NEW)
    compiled.clear()
    other = kvjax.generate(model, [row[::-1] for row in ROWS], policy=policy, max_new_tokens=NEW)
    assert compiled == []
    assert not np.array_equal(one.cache.entries.used, other.cache.entries.used)


def test_what_makes_no_sense():
    shared = GlobalShares(Fixed(24))
    with pytest.raises(ValueError, match=r"GlobalShares stores heads in segments.*positions='in_cache'"):
        on(shared, "streaming_llm:budget=24,positions=in_cache")
    with pytest.raises(
        ValueError, match=r"LastAttention: it has all heads .* the same tokens, and the budget GlobalShares"
    ):
        on(shared, "tova:budget=24")
    with pytest.raises(ValueError, match="groups=3 of 4 kv heads: expected a divisor of 4"):
        kvjax.generate(params(), ROWS, policy=on(GlobalShares(Fixed(24), groups=3), "h2o:budget=24"))
    with pytest.raises(ValueError, match="compress='chunk' would allocate the budget to layers and heads more"):
        kvjax.generate(params(), ROWS, policy=on(shared, "h2o:budget=24"), chunk=20, compress="chunk")
    cache = kvjax.generate(params(ONE_LAYER), ROWS, policy=on(shared, SNAPKV), max_new_tokens=NEW).cache
    with pytest.raises(ValueError, match="compress='end' would allocate"):
        kvjax.generate(params(ONE_LAYER), ROWS, cache=cache, compress="end")
    with pytest.raises(ValueError, match="expected one that limits every layer"):
        GlobalShares(policies.parse("full").budget)
    assert GlobalShares(Fraction(0.5)).smallest is None
