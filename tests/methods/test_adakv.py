"""AdaKV against its formulas in plain Python: counts, positions retained by a model, and its worked example."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import AdaptiveShares, Fixed, Pyramid
from kvjax.policies import adakv, dynamickv, h2o, parse, pyramidkv, snapkv
from tests import tiny
from tests.methods import allocating
from tests.methods.literal_budgets import adaptive, algorithm_1, best
from tests.methods.literal_budgets import snapkv as snapkv_scores
from tests.methods.reference import Reader

SIZE = 32
RNG = np.random.default_rng(2)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (30, 7, 21)]
PARAMS = tiny.decoder(8, 4, (None,) * 2)

E1 = [[0.30, 0.25, 0.20, 0.10, 0.05, 0.04, 0.03, 0.03], [0.15, 0.14, 0.13, 0.13, 0.12, 0.12, 0.11, 0.10]]


@partial(jax.jit, static_argnames=("budget", "least"))
def allocate(budget, scores, means, least):
    return budget.allocate(scores, means, least, ALL_HEADS)


@pytest.mark.parametrize(
    ("formula", "normalise", "alpha", "counts"),
    [
        ("code", False, 0.2, [3, 7]),
        ("code", True, 0.2, [4, 6]),
        ("code", False, 0.5, [4, 6]),
        ("code", True, 0.5, [4, 5]),
        ("paper", False, 0.2, [3, 7]),
        ("paper", True, 0.2, [4, 6]),
        ("paper", True, 0.5, [5, 5]),
        ("paper", False, 0.0, [3, 7]),
        ("paper", True, 1.0, [5, 5]),
        ("kvpress", False, 0.5, [3, 7]),
        ("kvpress", False, 0.8, [4, 6]),
    ],
)
def test_e1(formula, normalise, alpha, counts):
    budget = AdaptiveShares(Fixed(5), alpha, normalise, formula)
    allocated = allocate(budget, np.array(E1, np.float32)[None, None], np.array([[5]]), 0)
    assert allocated[0, 0].tolist() == counts


@pytest.mark.parametrize(("alpha", "counts"), [(0.0, [0, 2]), (0.01, [1, 1])])
def test_kvpress_keeps_an_entry_of_each_head_safe_unless_the_share_is_zero(alpha, counts):
    budget = AdaptiveShares(Fixed(1), alpha, normalise=False, formula="kvpress")
    assert allocate(budget, np.float32([[[[1, 2], [4, 3]]]]), np.array([[1]]), 0)[0, 0].tolist() == counts


@pytest.mark.parametrize("formula", ["paper", "code", "kvpress"])
@pytest.mark.parametrize(
    ("alpha", "normalise", "least", "groups"), [(0.2, True, 0, 1), (0.35, False, 9, 2), (0, True, 0, 2)]
)
def test_counts_are_the_formula(formula, alpha, normalise, least, groups):
    """Rows of different lengths, and layers of different means."""
    normalise = normalise and formula != "kvpress"
    rng = np.random.default_rng(len(formula))
    L, B, H, M = 2, 3, 4, 40
    scores = (rng.gamma(0.3, size=(L, B, H, M)) * rng.gamma(1.0, size=(L, B, H, 1))).astype(np.float32)
    lengths, means = np.array([40, 25, 6]), np.array([[14, 11, 14], [20, 10, 14]])
    for b, length in enumerate(lengths):
        scores[:, b, :, : M - length] = -np.inf
        scores[:, b, :, max(M - length, M - 5) :] = np.inf
    budget = AdaptiveShares(Fixed(14), alpha, normalise, formula, groups)
    counts = np.asarray(allocate(budget, scores, means, least))
    for layer, b in np.ndindex(L, B):
        for first in range(0, H, H // groups):
            own = slice(first, first + H // groups)
            got, mean = np.minimum(counts[layer, b, own], lengths[b]), means[layer, b]
            expected = adaptive(scores[layer, b, own], mean, least, alpha, normalise, formula)
            np.testing.assert_array_equal(got, np.minimum(expected, lengths[b]))
            over = got.sum() - H // groups * min(mean, lengths[b])
            assert over == 0 or (formula == "code" and -1.5 * H // groups <= over <= H // groups / 2)
            assert got.min() >= min(least, lengths[b])
    assert len(np.unique(counts[:, 0])) > 2, "or heads did not compete"


def test_heads_compete_for_what_layers_have_competed_for():
    """The means that DynamicKV allocates take the place of one mean."""
    scores = np.random.default_rng(0).gamma(0.5, size=(3, 2, 4, 40)).astype(np.float32)
    means, scores = np.full((3, 2), 14), scores * np.array([1, 2, 4])[:, None, None, None]
    by_layer = dynamickv(14, window=4).budget
    given = np.asarray(allocate(by_layer, scores, means, 0))[..., 0]
    assert len(np.unique(given)) > 2
    counts = allocate(AdaptiveShares(by_layer, 0.2), scores, means, 0)
    np.testing.assert_array_equal(counts, allocate(AdaptiveShares(Fixed(14), 0.2), scores, given, 0))
    np.testing.assert_array_equal(np.sum(counts, axis=2), 4 * given)


def test_rounded_up_in_every_head_there_is_room():
    """As released, three heads of four may each get half an entry more than their share."""
    budget = AdaptiveShares(Fixed(15), 0.2, False, "code")
    scores = np.full((1, 1, 4, 40), 1.0, np.float32)
    scores[0, 0, :3, :17] = 2
    scores[0, 0, 3, :9] = 2
    counts = allocate(budget, scores, np.array([[15]]), 0)[0, 0]
    assert counts.tolist() == [17, 17, 17, 10]
    assert budget.entries([15], [40], heads=4) >= sum(counts.tolist()) == 61


@pytest.mark.parametrize(("held", "counts"), [(8, [8, 8]), (9, [8, 7])])
def test_as_released_a_prompt_within_the_budget_stays_whole(held, counts):
    """Of 8 entries, floor(0.2 * 8) + round(0.8 * 8) are 7. Of 9, the heads win 9 and 7, and rounding leaves one out."""
    scores = np.where(np.arange(10) < held, 1, -np.inf).astype(np.float32)
    scores = np.broadcast_to(scores, (1, 1, 2, 10))
    assert allocate(AdaptiveShares(Fixed(8), 0.2, False, "code"), scores, np.array([[8]]), 0)[0, 0].tolist() == counts


@pytest.mark.slow
def test_heads_keep_their_own_best():
    """What heads of an evicting base hold stays with them: the layer's total is that of equal shares, at every step."""
    params, rng = tiny.decoder(8, 4), np.random.default_rng(2)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (30, 7)]
    _, cache = tiny.prefill(params, adakv(h2o(12, recent=2)), rows, 32)
    before = [[len(head) for head in layer] for layer in tiny.held(cache, 0)]
    assert [sum(layer) for layer in before] == [48]
    assert len(set(before[0])) > 1
    for token in rng.integers(0, tiny.VOCAB, (8, 2)):
        _, cache = tiny.step(params, cache, token, np.ones(2, bool))
        assert [[len(head) for head in layer] for layer in tiny.held(cache, 0)] == before
    assert [[len(head) for head in layer] for layer in tiny.held(cache, 1)] == [[12] * 4]


@cache
def reader(row):
    text = Reader(PARAMS)
    text.read(ROWS[row])
    return text


BASE = snapkv(12, window=4, kernel=3)


@cache
def all_tokens():
    """The rows as SnapKV reads them, whatever is then allocated by its scores."""
    return allocating.read(PARAMS, adakv(BASE), ROWS, SIZE)


def filled_by(policy):
    return allocating.reallocated(PARAMS, all_tokens(), policy, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.5, "groups": 2},
        {"formula": "code"},
        {"formula": "kvpress"},
        {"normalise": False},
    ],
    ids=str,
)
def test_retains_what_the_formula_keeps(options):
    """Of SnapKV's scores, which heads of a layer compare as they are or normalised (the default)."""
    if options:
        filled = filled_by(adakv(BASE, **options))
    else:
        _, filled = tiny.prefill(PARAMS, adakv(BASE), ROWS, SIZE)
    literal_options = {"normalise": options.get("formula") != "kvpress", **options}
    groups = literal_options.pop("groups", 1)
    for b, row in enumerate(ROWS):
        scores = snapkv_scores(reader(b), 4, "max", 3)
        counts = [np.concatenate([adaptive(x, 12, **literal_options) for x in np.split(own, groups)]) for own in scores]
        expected = best(scores, counts) if len(row) > 12 else reader(b).held()
        assert tiny.held(filled, b) == expected
    sizes = {len(head) for layer in tiny.held(filled, 0) for head in layer}
    assert len(sizes) > 2, "or heads did not compete"


@pytest.mark.slow
def test_normalising_changes_what_is_retained():
    by_mass, as_it_is = (filled_by(adakv(BASE, normalise=x)) for x in (True, False))
    assert tiny.held(by_mass, 0) != tiny.held(as_it_is, 0)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("formula", ["paper", "code", "kvpress"])
def test_ada_pyramidkv(formula):
    """Heads compete for the entries of their own layer: 4 and 14 or 2 of the others, in the mean 8."""
    pyramid = pyramidkv(12, window=4, kernel=3, beta=4, formula="code" if formula == "code" else "paper")
    if formula == "paper":
        _, filled = tiny.prefill(PARAMS, adakv(pyramid), ROWS, SIZE)
    else:
        filled = filled_by(adakv(pyramid, formula=formula))
    for b, row in enumerate(ROWS):
        means = [18, 6] if formula != "code" or len(row) >= 16 else [12, 12]
        scores = snapkv_scores(reader(b), 4, "max", 3)
        counts = [
            adaptive(own, n, normalise=formula != "kvpress", formula=formula)
            for own, n in zip(scores, means, strict=True)
        ]
        assert tiny.held(filled, b) == best(scores, counts)
        if formula != "code":
            sums = [sum(map(len, layer)) for layer in tiny.held(filled, b)]
            assert sums == [4 * min(n, len(row)) for n in means]
    assert len({len(head) for head in tiny.held(filled, 0)[0]}) > 1, "or heads did not compete"


@pytest.mark.slow
@pytest.mark.parametrize("formula", ["paper", "kvpress"])
def test_heads_compete_for_what_dynamickv_gives_a_layer(formula):
    base = dynamickv(12, window=4, kernel=3, interval=2)
    if formula == "paper":
        _, filled = tiny.prefill(PARAMS, adakv(base), ROWS, SIZE)
    else:
        filled = filled_by(adakv(base, formula=formula))
    for b, row in enumerate(ROWS):
        if len(row) <= 12:
            assert tiny.held(filled, b) == reader(b).held()
            continue
        scores = snapkv_scores(reader(b), 4, "avg", 3)
        given = [4 + len(layer[0]) for layer in algorithm_1(scores[..., :-4], 8, 2, 10)]
        counts = [
            adaptive(own, n, normalise=formula != "kvpress", formula=formula)
            for own, n in zip(scores, given, strict=True)
        ]
        assert tiny.held(filled, b) == best(scores, counts)
        assert [sum(map(len, layer)) for layer in tiny.held(filled, b)] == [4 * n for n in given]
    assert len(set(given)) > 1, "or layers did not compete"


@pytest.mark.slow
def test_heads_that_evict_hold_their_layer_s_own_number():
    """Under a pyramid the upper layers' heads hold fewer, at every step."""
    pyramid = Pyramid(Fixed(12), window=4, beta=4)
    policy = adakv(replace(h2o(12, recent=2), budget=pyramid))
    _, filled = tiny.prefill(PARAMS, policy, ROWS, SIZE)
    for token in RNG.integers(0, tiny.VOCAB, (12, len(ROWS))):
        before = [sum(map(len, layer)) for layer in tiny.held(filled, 0)]
        assert before == [4 * 18, 4 * 6]
        _, filled = tiny.step(PARAMS, filled, token, np.ones(len(ROWS), bool))
    assert [sum(map(len, layer)) for layer in tiny.held(filled, 1)] == [4 * 18, 4 * 6]


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="groups=3 of 4 kv heads"):
        tiny.empty(tiny.decoder(8, 4), adakv(snapkv(64), groups=3), np.ones(1), 8)


def test_options_as_text():
    """`normalise` follows the formula unless it is given."""
    assert parse("adakv:formula=kvpress") == adakv(formula="kvpress", normalise=False)
    assert parse("adakv") == adakv(normalise=True)
    assert parse("adakv:normalise=False,formula=code").budget.normalise is False
    with pytest.raises(ValueError, match="normalise=3"):
        parse("adakv:normalise=3")
