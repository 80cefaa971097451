"""Making room in slots: rows that evict several entries at a time do so in steps of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Layers, Slots
from kvjax.reading.widening import resized

CAPACITY, COUNT, STEPS = 8, 4, 13
HELD = (8, 7, 6, 1, 8)  # entries of each row at first; the last row has no tokens


@dataclass(frozen=True)
class Oldest:
    """Evicts the entries of the lowest positions, and notes the rows that are shown with entries."""

    count: int = COUNT
    piecewise: bool = True
    absorbs: bool = False
    shown: list[list[int]] = field(default_factory=list)

    def renew(self, entries: Slots) -> Slots:
        return entries

    def judge(self, entries: Slots) -> jax.Array:
        jax.debug.callback(
            lambda x: self.shown.append(np.flatnonzero((x >= 0).any((1, 2))).tolist()), entries.positions
        )
        return jnp.where(entries.positions < 0, jnp.inf, entries.positions.astype(jnp.float32))

    def victims(self, scores: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.argsort(scores, axis=-1)[..., : self.count]

    def release(self, entries: Slots, lost: jax.Array) -> Slots:
        return replace(entries, positions=jnp.where(lost, -1, entries.positions))


def test_rows_out_of_phase_are_judged_when_they_are_full() -> None:
    room, rows = Oldest(), len(HELD)
    at = jnp.arange(CAPACITY)
    positions = jnp.stack([jnp.where(at < held, at, -1) for held in HELD])[:, None]
    zeros = jnp.zeros((rows, 1, CAPACITY, 2))
    layers = Layers((Slots(zeros, zeros, positions, jnp.full((rows, 1), CAPACITY)),))
    incoming = jnp.arange(rows) < rows - 1

    @jax.jit
    def step(layers: Layers, position: jax.Array) -> tuple[Layers, jax.Array]:
        layers, slot = layers.make_room(0, incoming, room)
        token = jnp.zeros((rows, 1, 2))
        return layers.write(0, slot, token, token, position[:, None]), slot

    expected, held = [], np.array(HELD[:-1])
    for i in range(STEPS):
        full = held == CAPACITY
        expected += [np.flatnonzero(full).tolist()] if full.any() else []
        held = held - COUNT * full + 1
        layers, slot = step(layers, jnp.asarray(HELD) + i)
        jax.effects_barrier()
        assert layers.each[0].occupancy[:-1, 0].tolist() == held.tolist()
        assert (slot[:-1] < CAPACITY).all()
        assert slot[-1] == CAPACITY
    assert room.shown == expected
    assert len(expected) == STEPS - 1  # out of phase, some row evicts in nearly every step
    assert sum(map(len, expected)) == 4 + 3 + 3 + 2  # and each row in every fourth
    for row, positions in zip(HELD[:-1], layers.each[0].positions[:-1, 0], strict=True):
        left = sorted(p for p in positions.tolist() if p >= 0)
        assert left == list(range(row + STEPS - len(left), row + STEPS))
    assert layers.each[0].positions[-1, 0].tolist() == list(range(CAPACITY))


def test_numbers_of_entries_by_hand() -> None:
    """The fullest head decides what is occupied; what is held is a mean over heads, with settled entries."""
    positions = jnp.array([[[0, -1, 3, -1], [1, 2, 5, -1]], [[-1] * 4, [0, -1, -1, -1]]])
    settled: Any = SimpleNamespace(positions=jnp.array([[[4, 0], [-1, 0]], [[-1, -1]] * 2]))
    capacity = jnp.full((2, 2), 4)
    layers = Layers((Slots(None, None, positions, capacity), Slots(None, None, positions, capacity, settled=settled)))
    usage = layers.usage()
    assert (usage.occupied.tolist(), usage.free.tolist()) == ([[3, 3], [1, 1]], [[1, 1], [3, 3]])
    assert layers.held().tolist() == [[2.5, 4.0], [0.5, 0.5]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Doubled:
    """Settled entries that are stored at half of their size."""

    halves: jax.Array
    positions: jax.Array

    def plain(self) -> tuple[jax.Array, jax.Array]:
        return 2 * self.halves, 4 * self.halves


def test_settled_entries_are_seen_behind_those_in_slots() -> None:
    keys = jnp.arange(6.0).reshape(1, 1, 3, 2)
    settled: Any = Doubled(jnp.arange(4.0).reshape(1, 1, 2, 2), jnp.array([[[0, 1]]]))
    held = Slots(keys, -keys, jnp.array([[[2, 3, -1]]]), jnp.full((1, 1), 3), settled=settled)
    seen = jax.jit(Slots.plain)(held)
    assert seen.settled is None
    np.testing.assert_array_equal(seen.positions, [[[2, 3, -1, 0, 1]]])
    np.testing.assert_array_equal(seen.keys[0, 0, :, 0], [0, 2, 4, 0, 4])
    np.testing.assert_array_equal(seen.values[0, 0, :, 0], [0, -2, -4, 0, 8])


def test_layers_in_other_numbers_of_slots() -> None:
    """The first grows and the second loses an empty slot; a number of slots that fits changes nothing."""
    keys, positions = jnp.arange(6.0).reshape(1, 1, 3, 2), jnp.array([[[4, 7, -1]]])
    held = Slots(keys, keys, positions, jnp.full((1, 1), 3), per_slot=positions + 1.0)
    grown, trimmed, same = resized(Layers((held,) * 3), slots=(5, 2, 3))
    for layer, wanted in ((grown, [4, 7, -1, -1, -1]), (trimmed, [4, 7]), (same, [4, 7, -1])):
        n = min(len(wanted), 3)
        assert layer.positions[0, 0].tolist() == wanted
        assert layer.keys.shape == layer.values.shape == (1, 1, len(wanted), 2)
        np.testing.assert_array_equal(layer.keys[:, :, :n], keys[:, :, :n])
        np.testing.assert_array_equal(layer.per_slot[..., :n], held.per_slot[..., :n])
