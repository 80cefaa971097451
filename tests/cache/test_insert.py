"""New entries go into the first empty slots of each head, and leave all others as they are."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots

B, H, S, N, D = 3, 3, 9, 4, 5
NEW = (4, 2, 0)  # entries of each row; the columns before them are padding


def slots(positions: np.ndarray, first: int) -> Slots:
    """Entries whose numbers are all different."""

    def numbers(*shape: int) -> jax.Array:
        return jnp.arange(first, first + np.prod(shape), dtype=jnp.float32).reshape(shape)

    size = positions.shape[2]
    keys = {"codes": numbers(B, H, size, D), "scale": numbers(B, H, size, 1)}
    capacity = jnp.full((B, H), S)
    state = {"per_slot": numbers(B, H, 2, size), "bias": numbers(B, H, size)}
    return Slots(keys, numbers(B, H, size, D), jnp.asarray(positions), capacity, **state)


@pytest.mark.parametrize("more", [0, 3])
def test_it_is_a_loop_over_heads(more: int) -> None:
    """Heads have holes, but for one that is full, in the row that nothing enters, and some that are empty.

    Some slots more may have been added behind the others since the new entries were appended.
    """
    drawn = np.random.default_rng(0)
    held = np.full((B, H, S), -1, np.int32)
    for b, h, count in ((0, 0, 5), (0, 1, 3), (0, 2, 4), (1, 0, 7), (1, 1, 2), (2, 0, S), (2, 1, 3)):
        held[b, h, drawn.choice(S, count, replace=False)] = drawn.permutation(count)
    coming = np.full((B, H, N), -1, np.int32)
    for b, count in enumerate(NEW):
        coming[b, :, N - count :] = 20 + np.arange(count)
    old, new = slots(held, 0), slots(coming, 1000)
    joined = replace(old.append(new), keys=None, values=None)
    old, held = old.grow(S + more), np.pad(held, ((0, 0), (0, 0), (0, more)), constant_values=-1)
    found = jax.jit(Slots.insert)(old, new, joined)
    for name, axis in (("keys", 2), ("values", 2), ("positions", 2), ("per_slot", 3), ("bias", 2)):
        trees = (jax.tree.leaves(getattr(entries, name)) for entries in (found, old, new))
        for after, before, more in zip(*trees, strict=True):
            expected = np.moveaxis(np.array(before), axis, 2)
            for b, h in np.ndindex(B, H):
                empty = np.flatnonzero(held[b, h] < 0)[: NEW[b]]
                expected[b, h, empty] = np.moveaxis(np.array(more), axis, 2)[b, h, N - NEW[b] :]
            there = np.array(found.positions) >= 0  # the numbers of empty slots do not matter
            np.testing.assert_array_equal(np.moveaxis(np.array(after), axis, 2)[there], expected[there])
    assert np.sum(there) == np.sum(held >= 0) + H * sum(NEW)
