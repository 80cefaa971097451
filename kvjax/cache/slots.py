"""The entries of one layer in slots: a value of fixed shapes. It knows no policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import (
    Reduction,
    Stored,
    compact,
    set_slot,
    set_slots,
    traced_once,
    updated,
    window_scores,
    write_rows,
)

from .from_keys import Values, in_arrays


class Settled(Protocol):
    """Entries beside those in slots, in the form of a storage: a pytree whose leaves have axes [B, H, ...].

    Nothing is written to them any more, and none of them leaves.
    """

    @property
    def positions(self) -> Int[Array, "B H T"]:
        """The token position of each entry, int32, -1 where there is none."""

    def plain(self) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Returns keys and values as arrays."""

    def attention(
        self, q: Float[Array, "B Hq W D"], positions: Int[Array, "B W"], **logits: Any
    ) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
        """Returns the context and the log-sum-exp of W query rows; arguments are those of `slot_attention`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The entries of one layer. The order of slots is free: `positions` says which token a slot holds.

    Attributes:
        keys: rotated by RoPE to their original position, or not rotated if the policy rotates them by their place in
            the cache. The policy's storage fixes the form: an array [B, H, S, D], or a pytree whose leaves have axes
            [B, H, S, ...].
        values: in the same form; or `FromKeys`, for values that the keys contain.
        positions: the token position in each slot, int32, -1 if the slot is empty.
        capacity: the number of entries that each row and head may hold before it must evict, int32; UNLIMITED where
            nothing is ever evicted.
        per_slot: the score's state with axes [B, H, ..., S]. It moves with its slot and is cleared with it.
        per_row: the score's state with axes [B, H, ...] or [B, Hq, ...].
        merging: the merge's state with axes [B, H, ...].
        storing: the storage's state until the prompt has been read, with axes [B, H, ...] or [B, Hq, ...].
        bias: float32, added to the attention logits of each slot, 0 for an entry of one token. None unless the policy's
            merge weighs entries.
        settled: entries of the prompt beside those in slots, in another form. None unless the policy's storage settles
            a prompt, and until the prompt has been read.
    """

    keys: Float[Array, "B H S D"] | Any
    values: Float[Array, "B H S D"] | Any
    positions: Int[Array, "B H S"]
    capacity: Int[Array, "B H"]
    per_slot: Any = None
    per_row: Any = None
    merging: Any = None
    storing: Any = None
    bias: Float[Array, "B H S"] | None = None
    settled: Settled | None = None

    @classmethod
    def only(cls, **fields: Any) -> Slots:
        """Returns slots with some fields, the others None: what a program hands to another one of each kv head."""
        nothing: Any = None
        return cls(**{"keys": nothing, "values": nothing, "positions": nothing, "capacity": nothing} | fields)

    @property
    def slots(self) -> int:
        """S, the number of slots."""
        return self.positions.shape[-1]

    @property
    def occupancy(self) -> Int[Array, "B H"]:
        """The number of slots that hold a token."""
        return jnp.sum(self.positions >= 0, axis=-1)

    @property
    def all_positions(self) -> Int[Array, "B H _"]:
        """The token position of every entry, those of `settled` last."""
        if self.settled is None:
            return self.positions
        return jnp.concatenate([self.positions, self.settled.positions], axis=-1)

    def plain(self) -> Slots:
        """Returns the entries as policies and attention see them: keys and values as arrays, all in slots."""
        keys, values = in_arrays(self.keys, self.values)
        if self.settled is None:
            return replace(self, keys=keys, values=values)
        # Without the barrier XLA makes arrays of all layers before the tokens of this layer are there, and holds them.
        keys, values, settled = jax.lax.optimization_barrier((keys, values, self.settled))
        settled_keys, settled_values = settled.plain()
        return replace(
            self,
            keys=jnp.concatenate([keys, settled_keys], axis=2),
            values=jnp.concatenate([values, settled_values], axis=2),
            positions=self.all_positions,
            settled=None,
        )

    def in_order(self) -> Slots:
        """Returns the same entries in order of position, behind the empty slots."""
        order = jnp.argsort(self.positions, axis=-1)
        return self.gather(jnp.where(jnp.take_along_axis(self.positions, order, axis=-1) >= 0, order, -1))

    def parted(self, newest: int) -> tuple[Slots, Slots]:
        """Returns the latest entries of each head, at most `newest`, and the older ones, in the slots that are left.

        The older ones are in order of position, empty slots first.
        """
        order = jnp.argsort(-self.positions, axis=-1)  # the latest first, and empty slots last
        index = jnp.where(jnp.take_along_axis(self.positions, order, axis=-1) >= 0, order, -1)
        return self.gather(index[..., :newest]), self.gather(jnp.flip(index[..., newest:], axis=-1))

    def updated(self, before: Slots, after: Slots) -> Slots:
        """Applies the edits that made `after` of `before`, which is `plain()` of these entries.

        Slots with another key or value are stored anew; all others keep their stored bits.
        """
        return replace(
            after,
            keys=updated(self.keys, before.keys, after.keys),
            values=updated(self.values, before.values, after.values),
        )

    def received(
        self,
        *,
        q: Float[Array, "B Hq W D"],
        lse: Float[Array, "B Hq W"],
        query_positions: Int[Array, "B W"],
        reduction: Reduction,
        **logits: Any,
    ) -> Float[Array, "B H S"]:
        """Returns the reduced attention on each entry from queries that attended with this log-sum-exp, float32.

        Args:
            logits: of the layer, as `AttentionLayer.logits` has them.
        """
        given: dict[str, Any] = {"lse": lse, "bias": self.bias, "reduction": reduction}
        return window_scores(q, self.keys, query_positions, self.positions, **given, **logits)

    @property
    def has_state(self) -> bool:
        """Tells whether there is any state of score, merge or storage."""
        return any(state is not None for state in (self.per_slot, self.per_row, self.merging, self.storing))

    def without_state(self) -> Slots:
        """Drops the state of score, merge and storage, which nothing needs once nothing is evicted."""
        return replace(self, per_slot=None, per_row=None, merging=None, storing=None)

    @traced_once
    def gather(self, index: Int[Array, "B H K"]) -> Slots:
        """Returns the entries at `index`, in K slots; -1 makes an empty slot."""

        def take(x: Array, axis: int, empty: int) -> Array:
            B, H, K = index.shape
            shape = [B, H] + [1] * (x.ndim - 2)
            shape[axis] = K
            at = index.reshape(shape)
            taken = jnp.take_along_axis(x, jnp.maximum(at, 0), axis, mode="promise_in_bounds")
            return jnp.where(at >= 0, taken, jnp.asarray(empty, x.dtype))

        return self._changed(take)

    def _changed(self, change: Callable[..., Array], *others: Slots) -> Slots:
        """Applies `change(*arrays, axis=, empty=)` to each array of these entries and the same array of others.

        Slots are the axis `axis`, and an empty slot has `empty`.
        """

        def each(name: str, axis: int = -1, empty: int = 0) -> Any:
            arrays = (getattr(entries, name) for entries in (self, *others))
            return jax.tree.map(partial(change, axis=axis, empty=empty), *arrays)

        return replace(
            self,
            keys=each("keys", axis=2),
            values=each("values", axis=2),
            positions=each("positions", empty=-1),
            per_slot=each("per_slot"),
            bias=each("bias"),
        )

    def append(self, other: Slots) -> Slots:
        """Returns the slots of both, those of `other` last. Capacity and state per row are this one's."""

        def join(x: Array, y: Array, axis: int, empty: int) -> Array:
            return jnp.concatenate([x, y], axis) if self.slots else y

        if self.bias is not None and other.bias is None:
            other = replace(other, bias=jnp.zeros(other.positions.shape, self.bias.dtype))
        return self._changed(join, other)

    def insert(self, new: Slots, joined: Slots) -> Slots:
        """Returns these slots with new entries in the first empty ones of each head. Nothing that is held moves.

        Keys and values of other slots are not touched, so that a program that owns them writes the new ones alone.

        Args:
            new: in order; slots without an entry come first. There must be as many empty slots as entries.
            joined: what has become of `append(new)`, without keys and values, which have not changed. These slots may
                have been grown since.
        """
        (B, H, N), S = new.positions.shape, self.slots
        empty = self.positions < 0
        rank = jnp.arange(N) - jnp.sum(new.positions < 0, axis=-1, keepdims=True)
        slot = jnp.take_along_axis(compact(empty, N), jnp.maximum(rank, 0), axis=-1)
        slot = jnp.where((rank >= 0) & (slot >= 0), slot, S)
        at = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None], slot
        behind = joined.positions.shape[-1] - N + jnp.arange(N)
        source = set_slots(jnp.where(empty, -1, jnp.arange(S)), at, jnp.broadcast_to(behind, slot.shape))
        return replace(
            joined.gather(source),
            keys=jax.tree.map(lambda x, y: set_slots(x, at, y), self.keys, new.keys),
            values=jax.tree.map(lambda x, y: set_slots(x, at, y), self.values, new.values),
        )

    def write(self, slot: Int[Array, "B H"], key: Stored, value: Values, position: Int[Array, "B H"]) -> Slots:
        """Overwrites one slot per row and head, and clears its state. A slot beyond the last one writes nothing.

        Args:
            key: [B, H, D], in the form in which the other keys are stored.
            value: likewise.
        """
        clear = partial(set_slot, slot=slot, new=0)
        keys, values = write_rows((self.keys, self.values), slot, (key, value))
        return replace(
            self,
            keys=keys,
            values=values,
            positions=set_slot(self.positions, slot, position),
            per_slot=jax.tree.map(clear, self.per_slot),
            bias=jax.tree.map(clear, self.bias),
        )

    def grow(self, slots: int) -> Slots:
        """Returns the same entries in `slots` slots, the added ones empty; unchanged if there are as many already."""
        extra = slots - self.slots

        def widen(x: Array, axis: int, empty: int) -> Array:
            widths = [(0, 0, 0)] * x.ndim
            widths[axis] = (0, extra, 0)
            return jax.lax.pad(x, np.array(empty, x.dtype), widths)  # jnp.pad takes several times as long to trace

        return self._changed(widen) if extra > 0 else self

    def trim(self, slots: int) -> Slots:
        """Returns the first `slots` slots; those after them must be empty."""
        return self._changed(lambda x, axis, empty: jax.lax.slice_in_dim(x, 0, slots, axis=axis))


def slots_third(x: Array) -> Array:
    """Returns an array [B, H, ..., S] as [B, H, S, ...]."""
    return jnp.moveaxis(x, -1, 2)


def mark(index: Int[Array, "B H K"], size: int) -> Bool[Array, "B H size"]:
    """Returns True at the given indices; an index outside of 0 .. size - 1 is dropped."""
    if index.shape[2] == 1:  # a comparison, which other passes include
        return jnp.arange(size) == index
    b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
    unmarked = jnp.zeros((*index.shape[:2], size), bool)
    return unmarked.at[b, h, jnp.where(index < 0, size, index)].set(True, mode="drop")
