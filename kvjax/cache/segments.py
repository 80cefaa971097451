"""Entries laid out in segments of one pool: each head of each layer has as many rows as its own budget needs.

Shapes depend on the total alone, so prompts that share a budget differently run the same programs. A decode step reads
what segments hold and no more. Policies that judge each entry by itself get one piece of every segment at a time;
all others get segments laid out as long as the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.sharding import fetch
from kvjax.models import KvHeads
from kvjax.pallas_kernels import (
    PAGE,
    SegmentAttention,
    Stored,
    after_last,
    finite_or_zero,
    fold,
    pages,
    segment_attention,
    set_slots,
    visible,
    write_rows,
)

from .entries import Entries, MakeRoom, StepAttention, StepQuery, Take, Usage
from .from_keys import Values, for_attention, in_arrays
from .paging import MovePages, PutPages, starts, whole_pages
from .pieces import evicted, first_free, observed
from .sizes import UNLIMITED, bucket, rows_to_grow
from .slots import Slots, slots_third

BY_LAYER = ("start", "size", "used", "capacity", "per_row", "merging")  # the fields that have an item for each layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments(Entries):
    """One pool of rows. Each of P lanes holds H / P consecutive kv heads: layer after layer, head after head.

    Attributes:
        keys: T rows per lane. Starts and sizes of segments, and T, are multiples of PAGE. With other storage, a pytree
            whose leaves have axes [B, P, T, ...].
        values: in the same form; or `FromKeys`, for values that the keys contain.
        positions: the token position in each row, int32, -1 if the row is empty.
        start: the first row of each segment in its lane, for each layer.
        size: the number of rows of each segment, in whole pages, for each layer.
        used: the number of rows, from the first, beyond which a segment holds nothing, for each layer.
        capacity: the number of entries that a head may hold before it must evict, for each layer; where nothing is ever
            evicted, the sliding window or UNLIMITED. A segment with fewer rows grows.
        per_slot: the score's state with axes [B, P, T, ...].
        per_row: the score's state with axes [B, H, ...] or [B, Hq, ...], for each layer.
        merging: the merge's state with axes [B, H, ...], for each layer.
        bias: float32, added to the logits of each row; None unless the policy's merge weighs entries.
        growing: the number of segments per lane that grow while decoding.
        longest: an upper bound of the segments that decoding evicts from, for policies that must receive all of a
            segment; None where it is not known.
    """

    keys: Float[Array, "B P T D"] | Any
    values: Float[Array, "B P T D"] | Any
    positions: Int[Array, "B P T"]
    start: tuple[Int[Array, "B H"], ...]
    size: tuple[Int[Array, "B H"], ...]
    used: tuple[Int[Array, "B H"], ...]
    capacity: tuple[Int[Array, "B H"], ...]
    per_slot: Any
    per_row: tuple[Any, ...]
    merging: tuple[Any, ...]
    growing: int = field(metadata={"static": True})
    bias: Float[Array, "B P T"] | None = None
    longest: int | None = field(default=None, metadata={"static": True})

    preallocates: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.start)

    @property
    def stored(self) -> tuple[Stored, Values]:
        return self.keys, self.values

    @property
    def kv_heads(self) -> int:
        """H, the number of kv heads of every layer."""
        return self.start[0].shape[1]

    @property
    def heads(self) -> tuple[KvHeads, ...]:
        return (KvHeads(self.kv_heads, self.keys.shape[-1]),) * len(self)

    @property
    def bounds(self) -> tuple[int, ...]:
        return (self.positions.shape[2],) * len(self)

    @property
    def lanes(self) -> int:
        """P, the number of lanes."""
        return self.positions.shape[1]

    def layer(self, i: int, slots: int) -> Slots:
        return self.view(i, 0, slots)

    def of_layers(self, first: int, count: int) -> Segments:
        own: Any = {name: getattr(self, name)[first : first + count] for name in BY_LAYER}
        return replace(self, **own)

    def with_layers(self, first: int, part: Segments) -> Segments:
        each: Any = {name: _put(getattr(self, name), first, *getattr(part, name)) for name in BY_LAYER}
        return replace(part, **each)

    def take(self, layer: int, first: Int[Array, ""] | int, slots: int, x: Array) -> Array:
        """Takes the rows of `view` from an array [B, P, T, ...]: [B, H, slots, ...], undefined beyond a segment."""
        lane, page, _ = self._pages(layer, first, slots)
        taken = pages(x, lane, page)
        return taken.reshape(*taken.shape[:2], slots, *taken.shape[4:])

    def view(self, layer: int, first: Int[Array, ""] | int, slots: int) -> Slots:
        """Returns `slots` rows of each head's segment in a layer, from page `first` on; those beyond it are empty."""
        take, inside = partial(self.take, layer, first, slots), self._pages(layer, first, slots)[2]
        positions = jnp.where(jnp.repeat(inside, PAGE, axis=-1), take(self.positions), -1)
        return Slots(
            keys=jax.tree.map(take, self.keys),
            values=jax.tree.map(take, self.values),
            positions=positions,
            capacity=self.capacity[layer],
            per_slot=jax.tree.map(lambda x: jnp.moveaxis(take(x), 2, -1), self.per_slot),
            per_row=self.per_row[layer],
            merging=self.merging[layer],
            bias=jax.tree.map(take, self.bias),
        )

    def with_layer(self, i: int, layer: Slots) -> Segments:
        entries = layer.grow(whole_pages(layer.slots))
        put = PutPages(*self._pages(i, 0, entries.slots))
        return replace(
            self,
            keys=jax.tree.map(put, self.keys, entries.keys),
            values=jax.tree.map(put, self.values, entries.values),
            positions=put(self.positions, entries.positions),
            bias=jax.tree.map(put, self.bias, entries.bias),
            per_slot=jax.tree.map(put, self.per_slot, jax.tree.map(slots_third, entries.per_slot)),
            used=_put(self.used, i, after_last(layer.positions >= 0)),
            per_row=_put(self.per_row, i, layer.per_row),
            merging=_put(self.merging, i, layer.merging),
        )

    def with_state(self, layer: int, first: Int[Array, ""] | int, entries: Slots) -> Segments:
        """Returns the same entries with the score's state of a view that begins at page `first`."""
        put = PutPages(*self._pages(layer, first, entries.slots))
        per_slot = jax.tree.map(put, self.per_slot, jax.tree.map(slots_third, entries.per_slot))
        return replace(self, per_slot=per_slot, per_row=_put(self.per_row, layer, entries.per_row))

    def make_room(self, i: int, incoming: Bool[Array, "B"], room: MakeRoom) -> tuple[Segments, Int[Array, "B H"]]:
        pool, slot = evicted(self, i, incoming, room) if room.count else (self, first_free(self, i, room))
        return pool, jnp.where(incoming[:, None], slot, pool.size[i])

    def write(
        self, i: int, slot: Int[Array, "B H"], key: Stored, value: Values, position: Int[Array, "B H"]
    ) -> Segments:
        at = self._rows(i, slot)

        def put(x: Array, new: Array | int) -> Array:
            return set_slots(x, at, new)

        keys, values = write_rows((self.keys, self.values), at[2], (key, value))
        used = self.used[i]
        used = jnp.where(slot < self.size[i], jnp.maximum(used, slot + 1), used)
        return replace(
            self,
            keys=keys,
            values=values,
            positions=put(self.positions, position),
            used=_put(self.used, i, used),
            per_slot=jax.tree.map(lambda x: put(x, 0), self.per_slot),
            bias=jax.tree.map(lambda x: put(x, 0), self.bias),
        )

    def attend(self, i: int, query: StepQuery) -> StepAttention:
        found = segment_attention(
            query.q,
            *for_attention(self.keys, self.values),
            query.positions,
            self.positions,
            self.start[i],
            self.used[i],
            **query.logits,
            bias=self.bias,
            logits=query.reduction is not None,
            asked=query.asked,
        )
        received = None if query.reduction is None else partial(_received_by, found, query)
        scores = None
        if query.asked is not None and found.scores is not None:
            scores = partial(_asked_of, found.scores, query.asked.positions)
        return StepAttention(found.context, found.lse, received, scores)

    def observe(self, i: int, show: Callable[[Slots, Take], tuple[Any, Any]], room: MakeRoom) -> Segments:
        return observed(self, i, show, room)

    def exchange(self, change: Callable[[Sequence[Any]], Sequence[Any]]) -> Segments:
        return replace(self, per_row=tuple(change(self.per_row)))

    def drop(self, layer: int, slots: Int[Array, "B H K"]) -> Segments:
        """Empties slots of each head's segment in a layer. Slots beyond the segment's end are ignored."""
        positions = self.positions
        for k in range(slots.shape[-1]):
            b, lane, row = self._rows(layer, slots[..., k])
            positions = positions.at[b, lane, row].set(-1, mode="drop", unique_indices=True)
        return replace(self, positions=positions)

    def usage(self) -> Usage:
        capacity, used, size = (jnp.stack(each, axis=-1) for each in (self.capacity, self.used, self.size))
        grows = size < capacity
        occupied = jnp.maximum(used, jnp.where(grows, 0, capacity))
        free = jnp.where(grows, size - used, UNLIMITED)
        return Usage(jnp.max(occupied, axis=1), jnp.min(free, axis=1))

    @property
    def mean_slots(self) -> tuple[int, ...]:
        return (self.positions.size // (self.start[0].size * len(self)),)

    def held(self) -> Float[Array, "B L"]:
        return jnp.mean(jnp.stack(self.used, axis=-1).astype(jnp.float32), axis=1)

    def slots_after(
        self,
        occupied: Sequence[int],
        *,
        new: int,
        room: Sequence[int],
        kept: Sequence[int | None],
        windows: Sequence[int | None],
    ) -> tuple[int, ...]:
        return (whole_pages(bucket(max(occupied) + new)),) * len(self)

    def growth(self, usage: Usage, room: Sequence[int], *, windows: Sequence[int | None]) -> tuple[int, ...] | None:
        lack = max(room) - min(int(free) for free in usage.free)
        if lack <= 0:
            return None
        more, most = whole_pages(bucket(lack)), [None if window is None else whole_pages(window) for window in windows]
        return more, self.positions.shape[2] + rows_to_grow(more, most, self.kv_heads // self.lanes, self.growing)

    def filling(self, grows: Sequence[bool], windows: Sequence[int | None]) -> tuple[bool, ...]:
        return (self.growing > 0,) * len(self)

    def private(self) -> Segments:
        own: Any = {name: jax.tree.map(jnp.array, getattr(self, name)) for name in BY_LAYER}
        return replace(self, **own)

    def within(self, slots: int) -> Segments:
        """Returns the same with the caller's static bound on the entries of any segment."""
        return replace(self, longest=whole_pages(bucket(slots)))

    def plain(self) -> Segments:
        """Returns the same entries with keys and values as arrays."""
        keys, values = in_arrays(self.keys, self.values)
        return replace(self, keys=keys, values=values)

    def by_head(self, row: int, arrays: Any = None) -> list[list[Any]]:
        start, size = (np.stack([fetch(x)[row] for x in each], axis=-1) for each in (self.start, self.size))
        array = fetch(self.positions if arrays is None else arrays[0])[row]
        heads, layers = start.shape

        def segment(layer: int, head: int) -> Any:
            lane, first = head // (heads // self.lanes), start[head, layer]
            return array[lane, first : first + size[head, layer]]

        return [[segment(layer, head) for head in range(heads)] for layer in range(layers)]

    def grow(self, size: tuple[int, ...]) -> Segments:
        """Returns the same entries with more rows.

        Args:
            size: (more rows of each segment that grows, up to its capacity; all rows of a lane), in whole pages.
        """
        room, rows = size
        sizes = tuple(
            jnp.maximum(size, jnp.minimum(size + room, whole_pages(capacity)))
            for size, capacity in zip(self.size, self.capacity, strict=True)
        )
        start = starts(sizes, self.lanes)
        move = MovePages.of(self.start, start, self.size, self.positions.shape, rows)
        return replace(
            self,
            longest=None if self.longest is None else self.longest + room,
            keys=jax.tree.map(move, self.keys),
            values=jax.tree.map(move, self.values),
            positions=move(self.positions, -1),
            start=start,
            size=sizes,
            per_slot=jax.tree.map(move, self.per_slot),
            bias=jax.tree.map(move, self.bias),
        )

    def _pages(self, layer: int, first: Int[Array, ""] | int, slots: int) -> tuple[Any, Array, Array]:
        """Locates slots from page `first` on: (lane [H, 1], page [B, H, n], whether it is in the segment [B, H, n])."""
        H, start, size = self.kv_heads, self.start[layer], self.size[layer]
        offset = first + jnp.arange(slots // PAGE)
        # Quotients of numbers >= 0: JAX's other form adds operations that XLA compiles for every layer.
        page, count = jax.lax.div(start, PAGE)[..., None] + offset, jax.lax.div(size, PAGE)[..., None]
        return np.arange(H)[:, None] // (H // self.lanes), page, offset < count

    def _rows(self, layer: int, slot: Int[Array, "B H"]) -> tuple[Any, Any, Array]:
        """Returns (row of the batch, lane, row of the pool) of a slot; past the pool's end if past the segment's."""
        B, H = slot.shape
        row = jnp.where(slot < self.size[layer], self.start[layer] + slot, self.positions.shape[2])
        return np.arange(B)[:, None], np.arange(H) // (H // self.lanes), row


def _put(each: tuple[Any, ...], first: int, *new: Any) -> tuple[Any, ...]:
    """Replaces the part of some layers in a value of all layers."""
    return (*each[:first], *new, *each[first + len(new) :])


def _received_by(found: SegmentAttention, query: StepQuery, held: Slots, take: Take) -> Float[Array, "B H M"]:
    """Reduces the attention on a piece from the logits of the queries, or computes it again if there are none."""
    reduction, positions = query.reduction, query.positions
    assert reduction is not None
    if found.logits is None:
        given: dict[str, Any] = {"q": query.q, "lse": found.lse, "query_positions": positions, "reduction": reduction}
        return held.received(**given, **query.logits)
    logits = jnp.swapaxes(take(jnp.swapaxes(found.logits, 2, 3)), 2, 3)
    lse = found.lse.reshape(*logits.shape[:3], 1)
    seen = visible(positions, held.positions, query.logits["window"])
    weights = jnp.where(seen, jnp.exp(logits - finite_or_zero(lse)), 0.0)
    return fold(weights, reduction.of_group, axis=2)


def _asked_of(
    scores: Float[Array, "B P T"], asked: Int[Array, "B X"], held: Slots, take: Take
) -> Float[Array, "B H M"]:
    """Returns the attention that a piece received from the extra query rows at positions `asked`."""
    asking = jnp.any(asked >= 0, axis=1)[:, None, None]
    return jnp.where((held.positions >= 0) & asking, take(scores), 0.0)
