"""DefensiveKV against its definition in NumPy: the scores, and the positions retained by layer and over all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Score
from kvjax.models import AttentionLayer
from kvjax.pallas_kernels import Reduction
from kvjax.parts import AdaptiveShares, DefendedValues, Fixed, GlobalShares, Pooling, WindowAttention
from kvjax.policies import criticalkv, defensivekv, parse, snapkv
from tests import tiny
from tests.methods.literal_budgets import pooled, projected
from tests.methods.one_layer import ROPE, entries_at, moment
from tests.methods.reference import Reader

# For the tests of all presets, scores and wrappers in tests/policy.
OPTIONS = (
    "budget=12,window=4,kernel=3",
    "budget=0.5,window=3,kernel=3,pool=max,level=global,first=0.0",
    "budget=12,window=3,pool=none,level=global,groups=2",
)
SCORES = (DefendedValues(WindowAttention(4, Reduction(rows="max", group="max"))),)
CHANGES = {"DefendedValues": {"slotwise", "by_count", "marks"}}

ROWS = [np.random.default_rng(9).integers(0, tiny.VOCAB, n) for n in (30, 10, 21)]
PARAMS = tiny.decoder(8, 4, (None,) * 2)
BUDGET, WINDOW = 12, 4


@dataclass(frozen=True)
class Known(Score):
    """Scores that are known."""

    def __call__(self, entries, moment):
        return entries.per_slot


def test_an_example():
    """Of three entries the first was important once. The second has less than the mean, 0.32, and so has the third."""
    entries = entries_at(
        [[0, 1, 2, 3, -1]],
        values=[[[1, 0, 0, 0], [0, -1, 0, 0], [1, 1, 0, 0], [9, 9, 9, 9], [5, 5, 5, 5]]],
        per_slot=np.float32([[0.8, 0.1, 0.06, 0.0, 0.7]]),
    )
    layer = AttentionLayer(0, ROPE, None, 0.5, jnp.eye(4)[None])
    protected = jnp.array([[[False, False, False, True, False]]])
    now = moment(4)._replace(layer=layer, protected=protected)

    def scores(score, moment):
        return np.asarray(jax.jit(lambda entries: score(entries, moment))(entries))[0, 0]

    found = scores(DefendedValues(Known()), now)[:3]
    np.testing.assert_allclose(found, np.array([0.8, 0.32, 0.32]) * [1, 1, 2] / (4 / 3), rtol=1e-6)
    # Two of three entries: the newest is protected and fills the first stage, and the best product the second one.
    first = scores(DefendedValues(Known(), 0.5), now._replace(counts=jnp.array([[2]])))[:4]
    assert np.argsort(-first).tolist() == [3, 0, 2, 1]
    # With a first stage of three the second entry precedes the third, whose product is larger.
    first = scores(DefendedValues(Known(), 0.75), now._replace(counts=jnp.array([[4]])))[:4]
    assert set(np.argsort(-first)[:3].tolist()) == {3, 0, 1}
    after = scores(DefendedValues(Known(), 0.75), now._replace(counts=jnp.array([[6]]), leaving=2))[:4]
    np.testing.assert_array_equal(after, first)


@cache
def of_row(b, kind, kernel):
    """The worst case and the scores [L, H, N - W] of the entries older than the window of a row."""
    text = Reader(PARAMS)
    text.read(ROWS[b])
    older = range(text.length - WINDOW)
    weights = text.weights(range(text.length - WINDOW, text.length), older)
    worst = weights.max(axis=3).max(axis=2)
    worst = worst if kind == "none" else pooled(worst, kind, kernel)
    floored = np.maximum(worst, worst.mean(axis=-1, keepdims=True))
    norms = projected(PARAMS, text.values(), order=1).mean(axis=2)[..., : len(older)]
    return worst, floored * norms / norms.mean(axis=-1, keepdims=True)


def retained(worst, scores, level, first):
    """The positions [L][H] of a row, whose window is protected."""
    L, H, n = scores.shape
    free = BUDGET - WINDOW
    competing = scores.reshape(1 if level == "global" else L, -1)
    total = free * L * H // len(competing)
    order = np.argsort(-competing, axis=-1, kind="stable")[:, :total]
    counts = np.zeros(competing.shape, int)
    np.put_along_axis(counts, order, 1, axis=-1)
    counts = counts.reshape(L, H, n).sum(axis=-1)
    kept = []
    for i in range(L):
        kept.append([])
        for h in range(H):
            alone = max(int(first * (counts[i, h] + WINDOW) + 1e-4) - WINDOW, 0)  # the window is of the first stage
            chosen = np.argsort(-worst[i, h], kind="stable")[:alone].tolist()
            rest = [p for p in np.argsort(-scores[i, h], kind="stable").tolist() if p not in chosen]
            kept[-1].append(sorted([*chosen, *rest[: counts[i, h] - len(chosen)], *range(n, n + WINDOW)]))
    return kept


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("level", "kind", "kernel", "first"),
    [("layer", "avg", 5, 0.5), ("global", "avg", 3, 0.5), ("layer", "max", 3, 0.9), ("global", "none", 1, 0.0)],
)
def test_heads_retain_what_the_definition_does(level, kind, kernel, first):
    """Rows of different lengths, one of them within the budget."""
    policy = defensivekv(BUDGET, WINDOW, kernel, kind, level, first)
    _, filled = tiny.prefill(PARAMS, policy, ROWS, 32)
    sizes = set()
    for b, row in enumerate(ROWS):
        held = tiny.held(filled, b)
        if len(row) <= BUDGET:
            assert held == [[list(range(len(row)))] * 4] * 2
            continue
        expected = retained(*of_row(b, kind, kernel), level, first)
        assert held == expected
        totals = [sum(map(len, layer)) for layer in held]
        assert sum(totals) == 2 * 4 * BUDGET
        assert level == "global" or set(totals) == {4 * BUDGET}
        sizes |= {len(head) for layer in held for head in layer}
    assert len(sizes) > 2, "or heads did not compete"


@pytest.mark.long
def test_a_row_alone_is_the_row_in_company():
    policy = defensivekv(BUDGET, WINDOW, level="global")
    _, together = tiny.prefill(PARAMS, policy, ROWS, 32)
    for b in range(len(ROWS)):
        _, alone = tiny.prefill(PARAMS, policy, [ROWS[b]], 32)
        assert tiny.held(alone, 0) == tiny.held(together, b)


def test_its_parts():
    score = DefendedValues(WindowAttention(32, Reduction(rows="max", group="max"), Pooling("avg", 5)))
    by_layer, over_layers = defensivekv(64), defensivekv(64, level="global", groups=2)
    assert by_layer.score == over_layers.score == score
    assert by_layer.budget == AdaptiveShares(Fixed(64), alpha=0.0, normalise=False)
    assert over_layers.budget == GlobalShares(Fixed(64), 2)
    assert by_layer.protect == snapkv(64).protect
    assert parse(repr(over_layers)) == over_layers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("budget=32", r"a budget of 32 entries: expected 33 or more, which is window=32 \+ 1"),
        ("kernel=4", "kernel=4: expected an odd integer"),
    ],
)
def test_refusals(options, says):
    with pytest.raises(ValueError, match=f"^defensivekv: {says}"):
        parse(f"defensivekv:{options}")


def test_its_scores_weigh_values_already():
    with pytest.raises(ValueError, match=r"^criticalkv: its base DefendedValues already multiplies"):
        criticalkv(defensivekv(64))
