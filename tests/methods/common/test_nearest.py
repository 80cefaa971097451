"""The search for the retained key nearest to an evicted one, in blocks and pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.common import nearest


@pytest.mark.parametrize("slots", [10, 16, 45])
def test_the_nearest_by_blocks_and_pieces(slots, monkeypatch):
    """Against one comparison with all others: equal keys, empty slots among others, heads that evict less."""
    monkeypatch.setattr(nearest, "BLOCK", 8)
    monkeypatch.setattr(nearest, "PIECE", 16)
    rng = np.random.default_rng(slots)
    distinct = rng.normal(size=(6, 4)).astype(np.float32)
    keys, held = distinct[rng.integers(0, 6, (2, 3, 21))], distinct[rng.integers(0, 6, (2, 3, slots))]
    positions = rng.permuted(np.broadcast_to(np.arange(slots, dtype=np.int32), (2, 3, slots)), axis=2)
    positions[rng.random(positions.shape) < 0.4] = -1
    positions[0, 0, slots // 2 :] = -1
    positions[1, 2] = -1
    count = np.array([[21, 3, 0], [8, 9, 17]])
    others = Slots(jnp.asarray(held), jnp.asarray(held), jnp.asarray(positions), jnp.full((2, 3), slots))
    u, position = jax.jit(nearest.search)(jnp.asarray(keys), jnp.asarray(count), others)
    for b, h in np.ndindex(2, 3):
        for i in range(count[b, h]):
            key = keys[b, h, i] / np.linalg.norm(keys[b, h, i])
            cosines = held[b, h] @ key / np.linalg.norm(held[b, h], axis=1)
            cosines[positions[b, h] < 0] = -np.inf
            np.testing.assert_allclose(u[b, h, i], cosines.max(), atol=1e-5)
            if cosines.max() > -np.inf:
                close = np.where(cosines >= cosines.max() - 2e-5, positions[b, h], slots)
                assert position[b, h, i] == close.min()


@pytest.mark.parametrize("best_at", [0, 1])
def test_pieces_that_are_nearly_as_near_as_each_other(best_at, monkeypatch):
    """An entry close to the nearest of its own piece counts only if it is close to the nearest of all pieces."""
    monkeypatch.setattr(nearest, "BLOCK", 8)
    monkeypatch.setattr(nearest, "PIECE", 16)
    cosines = np.zeros((2, 16))
    cosines[1 - best_at, [4, 9]] = 0.5 - np.array([1.5, 0.6]) * nearest.CLOSE
    cosines[best_at, 7] = 0.5
    held = np.stack([cosines.ravel(), np.sqrt(1 - cosines.ravel() ** 2)], axis=-1).astype(np.float32)[None, None]
    positions = np.roll(np.arange(32, dtype=np.int32), 16 * (1 - best_at))[None, None]  # the other piece is earlier
    others = Slots(jnp.asarray(held), jnp.asarray(held), jnp.asarray(positions), jnp.full((1, 1), 32))
    keys = jnp.tile(jnp.array([1.0, 0.0]), (1, 1, 9, 1))
    u, position = jax.jit(nearest.search)(keys, jnp.full((1, 1), 9), others)
    np.testing.assert_allclose(u, 0.5, atol=1e-6)
    np.testing.assert_array_equal(position, positions[0, 0, 16 * (1 - best_at) + 9])


@pytest.mark.parametrize("chosen", [False, True])
def test_pairs_of_lost_entries_and_those_that_take_them_in(chosen):
    """In order of position, by slots; of all that are not lost, or of those that are chosen. Rows differ from heads."""
    rng = np.random.default_rng(3)
    B, H, S, count = 3, 2, 9, 4
    keys = rng.normal(size=(B, H, S, 4)).astype(np.float32)
    positions = rng.permuted(np.broadcast_to(np.arange(S, dtype=np.int32), (B, H, S)), axis=2)
    positions[positions == 5] = -1
    lost = (positions >= 0) & (positions < np.array([4, 3, 0])[:, None, None])
    lost[0, 1] &= positions[0, 1] != 2
    kept = np.where(lost | (positions < 7), -1, np.arange(S)) if chosen else None
    entries = Slots(*map(jnp.asarray, (keys, keys, positions)), jnp.full((B, H), S))
    slots, u, into = jax.jit(nearest.pairs, static_argnums=2)(entries, jnp.asarray(lost), count, kept)
    others = ~lost & (positions >= (7 if chosen else 0))
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    for b, h in np.ndindex(B, H):
        own = sorted(np.flatnonzero(lost[b, h]), key=lambda slot: positions[b, h, slot])
        assert slots[b, h].tolist() == [*own, *[-1] * (count - len(own))]
        cosines = np.where(others[b, h], unit[b, h, own] @ unit[b, h].T, -np.inf)
        np.testing.assert_allclose(u[b, h, : len(own)], cosines.max(axis=-1), atol=1e-5)
        assert into[b, h, : len(own)].tolist() == cosines.argmax(axis=-1).tolist()
