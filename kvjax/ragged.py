"""The cache of budgets that differ from head to head: one pool of rows, of which each head of each layer has a segment.

Shapes are fixed by the total alone, so prompts that are shared out differently run the same programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerCache
from kvjax.overwrite import set_slots
from kvjax.pallas_kernels import PAGE, Stored, after_last, pages
from kvjax.protocols import UNLIMITED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedCache:
    """The entries of all layers. P lanes hold H / P consecutive kv heads each, layer after layer, head after head.

    Attributes:
        keys: as in a LayerCache, T rows a lane; of other storage, a pytree whose leaves have axes [B, P, T, ...]. T is
            a multiple of PAGE, and so are starts and sizes.
        values: beside the keys.
        positions: the token position in each row, -1 if it is empty.
        start: the first row of a segment in its lane.
        size: its rows. What a head keeps is rounded up to whole pages.
        used: the rows from its first on, beyond which it holds nothing.
        capacity: how many entries it may hold before it must evict; UNLIMITED where nothing is ever evicted.
        per_slot: policy state with axes [B, P, T, ...].
        per_row: policy state with axes [B, H, ...] or [B, Hq, ...] for each layer.
        bias: of each row on the logits, where a merge weighs entries.
        longest: no segment that decoding evicts from is longer, where a policy has to look at whole ones; None where
            that is not known.
    """

    keys: Float[Array, "B P T D"] | Any
    values: Float[Array, "B P T D"] | Any
    positions: Int[Array, "B P T"]
    start: Int[Array, "B H L"]
    size: Int[Array, "B H L"]
    used: Int[Array, "B H L"]
    capacity: Int[Array, "B H L"]
    per_slot: Any
    per_row: tuple[Any, ...]
    bias: Float[Array, "B P T"] | None = None
    longest: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def pack(cls, layers: Sequence[LayerCache], lanes: int, rows: int, room: int) -> RaggedCache:
        """The layers' entries in segments of a pool of at least so many rows a lane, which must suffice.

        Args:
            layers: each head's entries in its first slots. What can grow has an UNLIMITED capacity.
            room: slots for tokens to come, in the segments that can grow.
        """
        first, T = layers[0], whole_pages(rows)
        capacity = jnp.stack([layer.capacity for layer in layers], axis=-1)
        used = jnp.stack([layer.occupancy for layer in layers], axis=-1)
        size = whole_pages(jnp.where(capacity < UNLIMITED, jnp.maximum(capacity, used), used + room))

        def empty(x: Array, fill: int = 0) -> Array:
            return jnp.full((len(x), lanes, T, *x.shape[3:]), fill, x.dtype)

        pool = cls(
            keys=jax.tree.map(empty, first.keys),
            values=jax.tree.map(empty, first.values),
            positions=empty(first.positions, -1),
            start=_starts(size, lanes),
            size=size,
            used=used,
            capacity=capacity,
            per_slot=jax.tree.map(lambda x: empty(jnp.moveaxis(x, -1, 2)), first.per_slot),
            per_row=tuple(layer.per_row for layer in layers),
            bias=jax.tree.map(empty, first.bias),
        )
        for i, layer in enumerate(layers):
            pool = pool.put(i, layer)
        return pool

    @property
    def lanes(self) -> int:
        return self.positions.shape[1]

    @property
    def layers(self) -> int:
        return self.start.shape[-1]

    @property
    def whole(self) -> int:
        """So many slots show all of any segment that decoding evicts from."""
        return self.positions.shape[2] if self.longest is None else self.longest

    def view(self, layer: int, first: Int[Array, ""] | int, slots: int) -> LayerCache:
        """So many slots of each head's segment in a layer, from page `first` on; those beyond its end are empty."""
        lane, page, inside = self._pages(layer, first, slots)

        def take(x: Array) -> Array:
            taken = pages(x, lane, page)
            return taken.reshape(*taken.shape[:2], slots, *taken.shape[4:])

        positions = jnp.where(jnp.repeat(inside, PAGE, axis=-1), take(self.positions), -1)
        return LayerCache(
            keys=jax.tree.map(take, self.keys),
            values=jax.tree.map(take, self.values),
            positions=positions,
            capacity=self.capacity[..., layer],
            per_slot=jax.tree.map(lambda x: jnp.moveaxis(take(x), 2, -1), self.per_slot),
            per_row=self.per_row[layer],
            bias=jax.tree.map(take, self.bias),
        )

    def put(self, layer: int, entries: LayerCache) -> RaggedCache:
        """The entries of a layer, in their order, from the first row of each segment on; it must hold them."""
        entries = entries.grow(whole_pages(entries.slots))
        pool = self.put_state(layer, 0, entries)
        put = _Put(*self._pages(layer, 0, entries.slots))
        return replace(
            pool,
            keys=jax.tree.map(put, self.keys, entries.keys),
            values=jax.tree.map(put, self.values, entries.values),
            positions=put(self.positions, entries.positions),
            bias=jax.tree.map(put, self.bias, entries.bias),
            used=self.used.at[..., layer].set(after_last(entries.positions >= 0)),
        )

    def put_state(self, layer: int, first: Int[Array, ""] | int, entries: LayerCache) -> RaggedCache:
        """The policy's state of a view that began at page `first`."""
        put = _Put(*self._pages(layer, first, entries.slots))
        per_slot = jax.tree.map(lambda x, new: put(x, jnp.moveaxis(new, -1, 2)), self.per_slot, entries.per_slot)
        per_row = (*self.per_row[:layer], entries.per_row, *self.per_row[layer + 1 :])
        return replace(self, per_slot=per_slot, per_row=per_row)

    def write(
        self,
        layer: int,
        slot: Int[Array, "B H"],
        key: Stored,
        value: Stored,
        position: Int[Array, "B H"],
    ) -> RaggedCache:
        """Overwrites one slot of each head's segment in a layer and clears its state. One beyond its end is dropped."""
        at = self._rows(layer, slot)

        def put(x: Array, new: Array | int) -> Array:
            return set_slots(x, at, new)

        used = self.used[..., layer]
        used = jnp.where(slot < self.size[..., layer], jnp.maximum(used, slot + 1), used)
        return replace(
            self,
            keys=jax.tree.map(put, self.keys, key),
            values=jax.tree.map(put, self.values, value),
            positions=put(self.positions, position),
            used=self.used.at[..., layer].set(used),
            per_slot=jax.tree.map(lambda x: put(x, 0), self.per_slot),
            bias=jax.tree.map(lambda x: put(x, 0), self.bias),
        )

    def drop(self, layer: int, slots: Int[Array, "B H K"]) -> RaggedCache:
        """Empties slots of each head's segment in a layer; those beyond its end are none."""
        positions = self.positions
        for k in range(slots.shape[-1]):
            b, lane, row = self._rows(layer, slots[..., k])
            positions = positions.at[b, lane, row].set(-1, mode="drop", unique_indices=True)
        return replace(self, positions=positions)

    def grow(self, room: int, growing: int) -> RaggedCache:
        """The same entries with more rows in every segment that can grow, of which a lane has so many."""
        room = whole_pages(room)
        size = self.size + jnp.where(self.capacity < UNLIMITED, 0, room)
        start = _starts(size, self.lanes)
        B, P, T = self.positions.shape
        page = jnp.arange((T + growing * room) // PAGE)

        def in_order(x: Int[Array, "B H L"]) -> Int[Array, "B P n"]:
            return jnp.swapaxes(x.reshape(B, P, -1, x.shape[-1]), 2, 3).reshape(B, P, -1)

        old, new, rows = (in_order(x) // PAGE for x in (self.start, start, self.size))
        segment = jnp.sum(page[:, None] >= new[:, :, None], axis=-1) - 1
        offset = page - jnp.take_along_axis(new, segment, axis=-1)
        kept = offset < jnp.take_along_axis(rows, segment, axis=-1)
        source = jnp.take_along_axis(old, segment, axis=-1) + offset

        def move(x: Array, fill: int = 0) -> Array:
            moved = pages(x, jnp.arange(P)[:, None], source)
            moved = jnp.where(kept.reshape(*kept.shape, *(1,) * (moved.ndim - 3)), moved, jnp.asarray(fill, x.dtype))
            return moved.reshape(B, P, -1, *x.shape[3:])

        return replace(
            self,
            longest=None if self.longest is None else self.longest + room,
            keys=jax.tree.map(move, self.keys),
            values=jax.tree.map(move, self.values),
            positions=move(self.positions, -1),
            start=start,
            size=size,
            per_slot=jax.tree.map(move, self.per_slot),
            bias=jax.tree.map(move, self.bias),
        )

    def _pages(self, layer: int, first: Int[Array, ""] | int, slots: int) -> tuple[Array, Array, Array]:
        """(lane [H, 1], page [B, H, n], whether it is within the segment [B, H, n]) of `slots` slots."""
        H = self.start.shape[1]
        offset = first + jnp.arange(slots // PAGE)
        page = self.start[..., layer, None] // PAGE + offset
        return jnp.arange(H)[:, None] // (H // self.lanes), page, offset < self.size[..., layer, None] // PAGE

    def _rows(self, layer: int, slot: Int[Array, "B H"]) -> tuple[Array, Array, Array]:
        """(row of the batch, lane, row of the pool) of a slot; past the pool's end if past the segment's."""
        B, H = slot.shape
        row = jnp.where(slot < self.size[..., layer], self.start[..., layer] + slot, self.positions.shape[2])
        return jnp.arange(B)[:, None], jnp.arange(H) // (H // self.lanes), row


@dataclass(frozen=True)
class _Put:
    """Writes pages into a pool's arrays, those outside of their segment excepted."""

    lane: Array
    page: Array
    inside: Array

    def __call__(self, x: Array, new: Array) -> Array:
        B, P, T = x.shape[:3]
        n = self.page.shape[-1]
        page = jnp.where(self.inside, self.page, T // PAGE)
        paged = x.reshape(B, P, T // PAGE, PAGE, *x.shape[3:])
        new = new.reshape(*new.shape[:2], n, PAGE, *new.shape[3:])
        row = jnp.arange(B)[:, None, None]
        return paged.at[row, self.lane, page].set(new, mode="drop", unique_indices=True).reshape(x.shape)


def whole_pages(rows: Any) -> Any:
    """As many rows in whole pages."""
    return (rows + PAGE - 1) // PAGE * PAGE


def _starts(size: Int[Array, "B H L"], lanes: int) -> Int[Array, "B H L"]:
    """Segments one after another in each lane: by layer, then by head."""
    B, H, L = size.shape
    in_order = jnp.swapaxes(size.reshape(B, lanes, H // lanes, L), 2, 3).reshape(B, lanes, -1)
    start = (jnp.cumsum(in_order, axis=-1) - in_order).reshape(B, lanes, L, H // lanes)
    return jnp.swapaxes(start, 2, 3).reshape(B, H, L)
