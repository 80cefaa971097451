"""DynamicKV against its Algorithm 1 as it is written, buffers that are cut again and again included."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.mesh.heads import ALL_HEADS
from kvjax.methods.dynamickv import _as_released, _exactly
from kvjax.parts import DynamicShares, Fixed
from kvjax.policies import dynamickv
from tests import tiny
from tests.methods.literal_budgets import algorithm_1, apportioned, pooled
from tests.methods.reference import Reader

SIZE, LAYERS = 32, 3
RNG = np.random.default_rng(4)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (29, 9, 20)]  # longer than the budget, shorter, and between


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (7, {"pool": "avg", "r_max": 1.25}),
        (4, {"pool": "none", "group": "max", "code_rounding": True}),
        (1, {"pool": "max"}),
    ],
)
def test_retains_what_algorithm_1_keeps(group: int, options: dict) -> None:
    """Three layers, of which the last makes an update of its own after that of the second."""
    params = tiny.decoder(2 * group, 2, (None,) * LAYERS)
    budget, window = 12, 4
    _, cache = tiny.prefill(params, dynamickv(budget, window, 3, interval=2, **options), ROWS, SIZE)
    sizes = set()
    for b, row in enumerate(ROWS):
        text, n = Reader(params), len(row)
        text.read(row)
        if n <= budget:
            assert tiny.held(cache, b) == text.held()
            continue
        weights = text.weights(range(n - window, n), range(n - window))
        scores = getattr(weights.sum(axis=-2), options.get("group", "mean"))(axis=2)
        scores = pooled(scores, options["pool"], 3)
        kept = algorithm_1(scores, budget - window, 2, options.get("r_max", 10), options.get("code_rounding", False))
        expected = [[sorted([*own, *range(n - window, n)]) for own in layer] for layer in kept]
        assert tiny.held(cache, b) == expected
        sizes |= {len(layer[0]) for layer in kept}
    assert len(sizes) > 2


G6 = np.array(
    [
        [0.9, 0.8, 0.7, 0.6, 0.05, 0.04],
        [0.5, 0.45, 0.03, 0.02, 0.01, 0.005],
        [0.85, 0.75, 0.65, 0.1, 0.09, 0.08],
        [0.55, 0.4, 0.35, 0.3, 0.25, 0.2],
    ],
    np.float32,
)


@partial(jax.jit, static_argnames=("shares", "least"))
def lengths(scores, mean, shares: DynamicShares, least: int = 0):
    """Entries [L, B, H] that our budget gives."""
    return shares.allocate(scores, jnp.broadcast_to(mean, scores.shape[:2]), least, ALL_HEADS)


@pytest.mark.parametrize(("code_rounding", "expected"), [(False, [4, 0, 3, 1]), (True, [4, 0, 2, 1])])
def test_g6(code_rounding: bool, expected: list[int]) -> None:
    """A layer of lower scores than its neighbour in the first update loses everything for good."""
    scores = np.repeat(G6[:, None], 4, axis=1)
    shares = DynamicShares(Fixed(2), interval=2, r_max=2, code_rounding=code_rounding)
    assert lengths(scores[:, None], jnp.array([2]), shares)[:, 0].T.tolist() == [expected] * 4
    assert [len(layer[0]) for layer in algorithm_1(scores, 2, 2, 2, code_rounding)] == expected


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("interval", "r_max", "code_rounding", "floor"),
    [(1, 10.0, False, 0), (2, 1.5, False, 2), (4, 10.0, True, 0), (3, 1.0, True, 2)],
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_shares_against_algorithm_1(interval, r_max, code_rounding, floor, seed) -> None:
    """Rows of different budgets and lengths; with a floor, every layer is given that much before the others compete."""
    rng = np.random.default_rng(seed)
    window, layers, heads, size = 3, 7, 2, 40
    scores = rng.random((layers, 3, heads, size)).astype(np.float32)
    scores *= rng.random((layers, 1, 1, 1)) ** 2
    there, mean = rng.integers(window + 1, size + 1, 3), rng.integers(window + floor + 1, 20, 3)
    for b, n in enumerate(there):
        scores[:, b, :, n - window : n] = np.inf
        scores[:, b, :, n:] = -np.inf
    shares = DynamicShares(Fixed(9), interval, r_max, code_rounding)
    ours = np.asarray(lengths(scores, mean, shares, window + floor if floor else 0))
    for b, n in enumerate(there):
        own, base = scores[:, b, :, : n - window], int(mean[b]) - window
        if n <= mean[b]:
            expected = [n] * layers
        else:
            kept = algorithm_1(own, base - floor, interval, r_max, code_rounding)
            expected = [window + min(floor + len(layer[0]), n - window) for layer in kept]
        assert ours[:, b].T.tolist() == [expected] * heads
        assert sum(expected) <= layers * mean[b]


def test_a_layer_with_a_sliding_window_counts_its_window() -> None:
    """Means of 9 and 30: what two layers hold stays if each mean has room; else they share twice 19, the mean."""
    scores = np.random.default_rng(0).random((2, 1, 2, 40)).astype(np.float32)
    scores[0, ..., :32] = -np.inf
    for held, expected in ((30, [[8, 8], [30, 30]]), (40, None)):
        own = np.where(np.arange(40) < 40 - held, -np.inf, scores)
        counts = np.asarray(DynamicShares(Fixed(30)).allocate(own, jnp.array([[9], [30]]), 0, ALL_HEADS))[:, 0]
        assert counts.tolist() == expected if expected else counts.sum() <= 2 * 2 * 19
        assert counts.max() <= held


def test_products_beyond_32_bits() -> None:
    """A prompt of a million tokens, budgets of thousands: counts times layers, and the released rounding's products."""
    counts = [700_001, 1_299_999, 400_000, 160_000]
    base = sum(counts) // 4 // 8
    given = jnp.array([counts])
    released = _as_released(given, jnp.array([base]), jnp.array([10 * base]), 4, 8)
    for code_rounding, ours in ((False, _exactly(given, 4, 8)), (True, released)):
        assert ours[0].tolist() == apportioned(counts, base, 10 * base, 4, code_rounding)
