"""A decode step in a pool of segments is one in slots: which entries leave, which slot is free, and the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import UNLIMITED, Layers, Segments, Slots, empty_pool, pieces
from kvjax.pallas_kernels import PAGE
from kvjax.policy import TopTokens

B, H, LAYERS, LANES, SLOTS = 3, 4, 2, 2, 40
INCOMING = np.array([True, False, True])
NEXT = 90  # the position of the token that comes in


@dataclass(frozen=True)
class Lowest:
    """Evicts the entries of the lowest state. Those at position 0 are no longer seen.

    If it absorbs, others of a head that evicts leave as well, and the states of all that stay change.
    """

    count: int
    piecewise: bool
    absorbs: bool

    def renew(self, entries: Slots) -> Slots:
        return replace(entries, positions=jnp.where(entries.positions == 0, -1, entries.positions))

    def judge(self, entries: Slots) -> jax.Array:
        return jnp.where(entries.positions < 0, jnp.inf, entries.per_slot)

    def victims(self, scores: jax.Array, positions: jax.Array) -> jax.Array:
        return TopTokens().victims(scores, positions, self.count)

    def release(self, entries: Slots, lost: jax.Array) -> Slots:
        evicts = jnp.any(lost, axis=-1, keepdims=True) & self.absorbs
        state = jnp.where(evicts, entries.per_slot + 100, entries.per_slot)
        gone = lost | (evicts & (entries.positions % 5 == 0))
        return replace(entries, positions=jnp.where(gone, -1, entries.positions), per_slot=state)


def drawn(grows: bool = False) -> tuple[Layers, Segments]:
    """Heads of different sizes with holes, some of them full, and a pool that holds the same.

    If it grows, so do the last heads of each lane and layer.
    """
    rng, layers, sizes = np.random.default_rng(3), [], []
    for _ in range(LAYERS):
        capacity = rng.integers(8, SLOTS + 1, (B, H))
        positions = np.full((B, H, SLOTS), -1)
        for b, h in np.ndindex(B, H):
            held = capacity[b, h] - (b + h) % 2 * rng.integers(0, 4)
            slots = rng.permutation(capacity[b, h])[:held]
            positions[b, h, slots] = rng.permutation(80)[:held]
        keys, values = rng.normal(size=(2, B, H, SLOTS, 2)).astype(np.float32)
        state = rng.normal(size=(B, H, SLOTS)).astype(np.float32)
        sizes.append(jnp.asarray(capacity))
        capacity = np.where(np.arange(H) % 2 & grows, UNLIMITED, capacity)
        layers.append(Slots(*map(jnp.asarray, (keys, values, positions, capacity, state))))
    capacities = tuple(layer.capacity for layer in layers)
    rows = LAYERS * H // LANES * (SLOTS + PAGE - 1)
    growing = LAYERS * H // LANES // 2 * grows
    shape = {"lanes": LANES, "rows": rows, "room": 0, "growing": growing}
    pool = empty_pool(layers[0], capacities, tuple(sizes), (None,) * LAYERS, **shape)
    for i, layer in enumerate(layers):
        pool = pool.with_layer(i, layer)
    return Layers(tuple(layers)), pool.within(SLOTS)


@partial(jax.jit, static_argnames=("i", "room"))
def stepped(entries: Any, i: int, room: Lowest) -> tuple[Any, jax.Array, Any, Any]:
    """Layer i after room was made, the slot that is free, and the layer with one more token that it has observed.

    Of a pool also the rows that segments use then.
    """
    after, slot = entries.make_room(i, jnp.asarray(INCOMING), room)
    new = jnp.full((B, H, 2), 7.0)
    written = after.write(i, slot, new, new, jnp.full((B, H), NEXT))

    def show(held: Slots, take: Any) -> tuple[Any, Any]:
        return jnp.where(held.positions >= 0, held.per_slot + held.positions / 10, 0), held.per_row

    observed = written.observe(i, show, room)
    return after.layer(i, SLOTS + 8), slot, observed.layer(i, SLOTS + 8), getattr(observed, "used", None)


def contents(layer: Slots, row: int, head: int) -> dict[int, tuple[Any, ...]]:
    """{position: (key, value, state)}, without what is no longer seen."""
    arrays = layer.positions, layer.keys, layer.values, layer.per_slot
    positions, *others = (np.asarray(x)[row, head] for x in arrays)
    return {int(p): tuple(x.tolist() for x in own) for p, *own in zip(positions, *others, strict=True) if p > 0}


@pytest.mark.parametrize(
    ("i", "room", "piece"),
    [
        (0, Lowest(1, piecewise=True, absorbs=False), PAGE),
        (1, Lowest(3, piecewise=True, absorbs=False), PAGE),
        (1, Lowest(2, piecewise=False, absorbs=True), None),
    ],
)
def test_it_makes_the_same_room(i: int, room: Lowest, piece: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", piece or pieces.PIECE)
    layers, pool = drawn()
    (expected, _, observed, _), (found, slot, ours, used) = (stepped(entries, i, room) for entries in (layers, pool))
    size, evicted = np.asarray(pool.size[i]), 0
    for b, h in np.ndindex(B, H):
        own, before = contents(found, b, h), contents(layers[i], b, h)
        assert own == contents(expected, b, h)
        assert contents(ours, b, h) == contents(observed, b, h)
        evicted += own != before
        at = int(slot[b, h])
        assert (at < size[b, h]) == INCOMING[b]
        rows = max(int(np.flatnonzero(found.positions[b, h] >= 0)[-1]), at if INCOMING[b] else 0) + 1
        assert rows <= used[i][b, h] <= max(rows, int(pool.used[i][b, h]))
        if INCOMING[b]:
            assert found.positions[b, h, at] <= 0
            assert ours.positions[b, h, at] == NEXT
            assert ours.per_slot[b, h, at] == NEXT / 10
    assert evicted >= 4


def test_a_pool_that_grows_holds_the_same() -> None:
    """Heads that grow have two pages more, of empty rows; all others have the rows that they had."""
    layers, pool = drawn(grows=True)
    rows = pool.positions.shape[2] + 2 * PAGE * pool.growing
    after = jax.jit(Segments.grow, static_argnums=1)(pool, (2 * PAGE, rows))
    assert after.positions.shape[2] == rows
    assert after.longest == pool.longest + 2 * PAGE
    assert jnp.sum(after.positions >= 0) == jnp.sum(pool.positions >= 0)
    for i in range(LAYERS):
        more = np.asarray(after.size[i] - pool.size[i])
        assert (more == np.where(np.arange(H) % 2, 2 * PAGE, 0)).all()
        found, used = jax.jit(Segments.layer, static_argnums=(1, 2))(after, i, SLOTS + 24), np.asarray(pool.used[i])
        for b, h in np.ndindex(B, H):
            held = np.asarray(layers[i].positions[b, h])
            assert contents(found, b, h) == contents(layers[i], b, h)
            assert used[b, h] == np.flatnonzero(held >= 0)[-1] + 1
            own = after.by_head(b)[i][h]
            assert len(own) == after.size[i][b, h]
            assert own[: used[b, h]].tolist() == held[: used[b, h]].tolist()
            assert (own[used[b, h] :] < 0).all()
    free = np.asarray(after.usage().free) - np.asarray(pool.usage().free)
    assert (free == 2 * PAGE).all()
