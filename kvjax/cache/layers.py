"""Entries laid out layer by layer, each layer with slots of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.sharding import fetch
from kvjax.models import KvHeads
from kvjax.pallas_kernels import Stored, joined, slot_attention

from .entries import Entries, MakeRoom, StepAttention, StepQuery, Take, Usage
from .from_keys import Values, for_attention
from .sizes import bucket
from .slots import Slots, mark


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers(Entries):
    """One `Slots` per layer. Layers may differ in their heads and their number of slots, heads of a layer may not."""

    each: tuple[Slots, ...]

    preallocates: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.each)

    @property
    def stored(self) -> tuple[Stored, Values]:
        return self.each[0].keys, self.each[0].values

    @property
    def heads(self) -> tuple[KvHeads, ...]:
        return tuple(KvHeads(layer.positions.shape[1], layer.keys.shape[-1]) for layer in self.each)

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(layer.slots for layer in self.each)

    def layer(self, i: int, slots: int) -> Slots:
        return self.each[i]

    def with_layer(self, i: int, layer: Slots) -> Layers:
        return Layers((*self.each[:i], layer, *self.each[i + 1 :]))

    def of_layers(self, first: int, count: int) -> Layers:
        return Layers(self.each[first : first + count])

    def with_layers(self, first: int, part: Layers) -> Layers:
        return Layers((*self.each[:first], *part.each, *self.each[first + len(part) :]))

    def make_room(self, i: int, incoming: Bool[Array, "B"], room: MakeRoom) -> tuple[Layers, Int[Array, "B H"]]:
        entries = room.renew(self.each[i])
        slot = _first_empty(entries, incoming)
        if room.count:
            entries, freed = _evicted(entries, incoming, room)
            slot = jnp.minimum(slot, freed)
        return self.with_layer(i, entries), slot

    def write(self, i: int, slot: Int[Array, "B H"], key: Stored, value: Values, position: Int[Array, "B H"]) -> Layers:
        return self.with_layer(i, self.each[i].write(slot, key, value, position))

    def attend(self, i: int, query: StepQuery) -> StepAttention:
        entries = self.each[i] if query.seen is None else query.seen
        found = slot_attention(
            query.q,
            *for_attention(entries.keys, entries.values),
            query.positions,
            entries.positions,
            **query.logits,
            bias=entries.bias,
            received=None if query.reduction is None else query.reduction.of_group,
            asked=query.asked,
        )
        context, lse = found.context, found.lse
        settled = entries.settled
        if settled is not None and settled.positions.size:  # the layer evicts nothing: nobody asks what they received
            context, lse = joined((context, lse), settled.attention(query.q, query.positions, **query.logits))
        return StepAttention(context, lse, _all_of(found.received), _all_of(found.scores))

    def observe(self, i: int, show: Callable[[Slots, Take], tuple[Any, Any]], room: MakeRoom) -> Layers:
        per_slot, per_row = show(self.each[i].plain(), lambda x: x)
        return self.with_layer(i, replace(self.each[i], per_slot=per_slot, per_row=per_row))

    def exchange(self, change: Callable[[Sequence[Any]], Sequence[Any]]) -> Layers:
        after = change([layer.per_row for layer in self.each])
        return Layers(tuple(replace(layer, per_row=own) for layer, own in zip(self.each, after, strict=True)))

    def usage(self) -> Usage:
        occupied = jnp.stack([jnp.max(layer.occupancy, axis=1) for layer in self.each], axis=-1)
        return Usage(occupied, jnp.array(self.bounds) - occupied)

    @property
    def mean_slots(self) -> tuple[int, ...]:
        settled = [0 if layer.settled is None else layer.settled.positions.shape[-1] for layer in self.each]
        return tuple(layer.slots + more for layer, more in zip(self.each, settled, strict=True))

    def held(self) -> Float[Array, "B L"]:
        counts = [jnp.sum(layer.all_positions >= 0, axis=-1) for layer in self.each]
        return jnp.stack([jnp.mean(count.astype(jnp.float32), axis=1) for count in counts], axis=1)

    def slots_after(
        self,
        occupied: Sequence[int],
        *,
        new: int,
        room: Sequence[int],
        kept: Sequence[int | None],
        windows: Sequence[int | None],
    ) -> tuple[int, ...]:
        slots = []
        for now, there, more, most, window in zip(self.bounds, occupied, room, kept, windows, strict=True):
            if most is not None:
                needed = most + more
            else:
                needed = there + new + more
                if needed <= now:
                    needed = now
                elif there:
                    needed = bucket(needed)
            slots.append(needed if window is None else min(needed, window))
        return tuple(slots)

    def growth(self, usage: Usage, room: Sequence[int], *, windows: Sequence[int | None]) -> tuple[int, ...] | None:
        occupied, kept = [int(n) for n in usage.occupied], [None] * len(self)
        slots = self.slots_after(occupied, new=0, room=room, kept=kept, windows=windows)
        return None if slots == self.bounds else slots

    def grow(self, size: tuple[int, ...]) -> Layers:
        return Layers(tuple(layer.grow(slots) for layer, slots in zip(self.each, size, strict=True)))

    def filling(self, grows: Sequence[bool], windows: Sequence[int | None]) -> tuple[bool, ...]:
        return tuple(one and slots != window for one, slots, window in zip(grows, self.bounds, windows, strict=True))

    def private(self) -> Layers:
        def own(layer: Slots) -> Slots:
            names = ("capacity", "per_row", "merging", "storing", "settled")
            return replace(layer, **{name: jax.tree.map(jnp.array, getattr(layer, name)) for name in names})

        return Layers(tuple(map(own, self.each)))

    def by_head(self, row: int, arrays: Any = None) -> list[list[Any]]:
        arrays = [layer.all_positions for layer in self.each] if arrays is None else arrays
        return [list(fetch(layer)[row]) for layer in arrays]


def _all_of(x: Array | None) -> Callable[[Slots, Take], Array] | None:
    """Wraps `x` for a layout that passes a layer's entries all at once."""
    return None if x is None else lambda _, take: take(x)


def _first_empty(entries: Slots, incoming: Bool[Array, "B"]) -> Int[Array, "B H"]:
    """Finds the first empty slot of each head in rows with an incoming token; S in other rows and in full heads."""
    empty = (entries.positions < 0) & incoming[:, None, None]
    return jnp.min(jnp.where(empty, jnp.arange(entries.slots), entries.slots), axis=-1, initial=entries.slots)


def _evicted(entries: Slots, incoming: Bool[Array, "B"], room: MakeRoom) -> tuple[Slots, Int[Array, "B H"]]:
    """Returns a layer after its full heads, in rows with an incoming token, have evicted `room.count` entries each.

    Returns also the first empty slot that the eviction leaves; S if it leaves none.
    """
    S = entries.slots
    # Rows without a token count as empty, so that all layers read `incoming`: a GPU then counts in one kernel.
    held = jnp.sum((entries.positions >= 0) & incoming[:, None, None], axis=-1)
    full = (held >= entries.capacity) & incoming[:, None]

    def judge(shown: Slots) -> Int[Array, "B H count"]:
        return room.victims(room.judge(shown), shown.positions)

    if room.count == 1:
        victims = judge(entries)
        after = room.release(entries, full[..., None] & mark(victims, S))
        if not room.absorbs:  # the slot is known without another search
            return after, jnp.where(full, victims[..., 0], S)
    else:
        # Rows of an engine become full in different steps. The others are shown as empty: a GPU's kernels read no keys
        # of empty rows. Nothing of the cache's size may leave a cond: XLA would copy the keys and values.
        judged = jnp.any(full, axis=1)[:, None, None]
        shown = replace(entries, positions=jnp.where(judged, entries.positions, -1))
        nothing = jnp.zeros(entries.positions.shape, bool)
        lost = jax.lax.cond(jnp.any(full), lambda: full[..., None] & mark(judge(shown), S), lambda: nothing)
        after = room.release(entries, lost)
    return after, _first_empty(after, incoming)
