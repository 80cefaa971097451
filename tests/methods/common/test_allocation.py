"""What allocated budgets share: entries that each head retains before heads compete, and heads on several devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.methods.common.allocation import raise_best, scaled
from kvjax.parts import AdaptiveShares, CompositeShares, DynamicShares, Everything, Fixed, GlobalShares, UniformShares
from kvjax.policy import Layout


@pytest.mark.parametrize("least", [0, 2, 9, np.array([2, 2]), np.array([[1, 2], [3, 0]])], ids=str)
def test_exactly_the_best_are_raised(least):
    """Of equal scores as many as it takes, and no empty slot."""
    scores = np.array([[[3, 1, 1, 1, -np.inf], [2, 2, 2, 0, 0]], [[-1, -1, -5, -1, -1], [7, 8, 9, -np.inf, 1]]])
    raised = np.asarray(raise_best(jnp.asarray(scores, jnp.float32), least))
    for b, x in np.ndindex(2, 2):
        own = np.sort(scores[b, x])[::-1].copy()
        count = np.broadcast_to(np.asarray(least).reshape(-1, 1) if np.ndim(least) == 1 else least, (2, 2))[b, x]
        own[:count] = np.where(own[:count] > -np.inf, np.inf, -np.inf)
        np.testing.assert_array_equal(np.sort(raised[b, x])[::-1], own)


@pytest.mark.parametrize(
    "budget",
    [
        GlobalShares(Fixed(3), min_tokens=2),
        AdaptiveShares(Fixed(3), alpha=0.7, normalise=False, formula="kvpress"),
    ],
    ids=["kvzip", "kvpress"],
)
def test_ties_beyond_what_a_head_is_safe_to_retain_compete(budget):
    """A head of equal scores is given the two that are safe, and not all that score as the second."""
    scores = jnp.array([[[1.0] * 6, [6.0, 5.0, 4.0, 3.0, 2.0, 0.0]]])[None]
    assert budget.allocate(scores, jnp.array([[3]]), 0, ALL_HEADS).tolist() == [[[2, 4]]]


def test_shares_whose_products_exceed_32_bits():
    """Against Python's integers: random numbers, all, nothing, five times the whole, and a whole of nothing."""
    a, b, c = np.random.default_rng(0).integers(0, 2**29, (3, 200))
    a[:4], b[:4], c[:4] = [2**29, 7, 5, 5], [2**29, 0, 40, 9], [2**29, 3, 8, 0]
    fits = [(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True) if x * y // max(z, 1) < 2**31]
    assert len(fits) > 100
    found = jax.jit(scaled)(*(jnp.array(x, jnp.int32) for x in zip(*fits, strict=True)))
    assert found.tolist() == [x * y // max(z, 1) for x, y, z in fits]


def test_dense_layers_are_the_first_and_the_last():
    assert [Layout(dense=(2, 3)).is_dense(layer, 7) for layer in range(7)] == [True] * 2 + [False] * 2 + [True] * 3


def test_a_budget_without_a_limit_is_refused():
    for part in (GlobalShares, UniformShares, AdaptiveShares):
        with pytest.raises(ValueError, match=r"a budget of Everything\(\): expected one that limits"):
            part(Everything())


@pytest.mark.slow(first=1)
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize(
    "budget",
    [
        CompositeShares(Fixed(6)),
        CompositeShares(Fixed(6), heads="max"),
        GlobalShares(Fixed(6), groups=2),
        AdaptiveShares(Fixed(6), groups=2),
        AdaptiveShares(DynamicShares(Fixed(6), interval=2), groups=2),
    ],
    ids=str,
)
def test_devices_with_some_of_the_heads_allocate_as_one_device(budget):
    scores = np.random.default_rng(0).random((3, 2, 4, 20)).astype(np.float32)
    scores *= np.random.default_rng(1).random((3, 1, 4, 1)).astype(np.float32)
    means, of_heads = jnp.full((3, 2), 6), PartitionSpec(None, None, "model")

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,)),
        in_specs=of_heads,
        out_specs=of_heads,
        check_vma=False,
    )
    def on_two(scores):
        return budget.allocate(scores, means, 0, Heads("model"))

    at_once = jax.jit(lambda scores: budget.allocate(scores, means, 0, ALL_HEADS))(scores)
    np.testing.assert_array_equal(on_two(scores), at_once)
    assert len(np.unique(at_once)) > 2
