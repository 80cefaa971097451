"""The interface of the entries of all layers, in either layout. It knows no policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from jaxtyping import Array, Bool, Float, Int

from kvjax.models import KvHeads
from kvjax.pallas_kernels import Asked, Reduction, Stored

from .from_keys import Values
from .slots import Slots


class Usage(NamedTuple):
    """The occupancy of the layers: arrays [B, L], or lists [L] on the host for the fullest row.

    Attributes:
        occupied: the largest number of slots that any head occupies, or will once it is full.
        free: the smallest number of empty slots of any head that grows; UNLIMITED where none does.
    """

    occupied: Int[Any, "*B L"]
    free: Int[Any, "*B L"]


# Slices a per-entry array of the whole layout down to the entries that a score sees.
Take = Callable[[Array], Array]


class StepQuery(NamedTuple):
    """One query per row, and the reductions that are requested of its attention.

    Attributes:
        q: the queries.
        positions: of the queries, -1 in rows without one.
        logits: of the layer, as `AttentionLayer.logits` has them.
        reduction: the reduction of the attention on entries; None if no score requests it.
        asked: extra query rows to score in the same pass over the keys.
        seen: the layer as the query sees it, if that differs from what is stored (rotation by place).
    """

    q: Float[Array, "B Hq 1 D"]
    positions: Int[Array, "B 1"]
    logits: Mapping[str, Any]
    reduction: Reduction | None = None
    asked: Asked | None = None
    seen: Slots | None = None


class StepAttention(NamedTuple):
    """The attention of one decoded token per row in a layer.

    Attributes:
        context: the weighted mean of the values.
        lse: the log-sum-exp of each query's scaled logits, without sinks.
        received: computes the attention that entries received from the query, reduced, [B, H, M]. Its
            arguments are those that `Entries.observe` passes to `show`. None if no reduction was requested.
        asked: computes the attention that entries received from the extra query rows, [B, H, M], from the same
            arguments; None if there were none, or a kernel would read the keys again for them.
    """

    context: Float[Array, "B Hq 1 D"]
    lse: Float[Array, "B Hq 1"]
    received: Callable[[Slots, Take], Array] | None
    asked: Callable[[Slots, Take], Array] | None


class MakeRoom(Protocol):
    """The decisions of a policy that makes room for one token per row. Layouts only find and empty slots."""

    @property
    def count(self) -> int:
        """The number of entries that leave a full head together; 0 in a layer that grows instead."""

    @property
    def window(self) -> int | None:
        """The sliding window of the layer; None if there is none."""

    @property
    def piecewise(self) -> bool:
        """Tells whether entries can be judged a piece of each head at a time."""

    @property
    def absorbs(self) -> bool:
        """Tells whether `release` changes the entries that stay."""

    def renew(self, entries: Slots) -> Slots:
        """Returns the entries without those that no later query can see, and with the capacity of this step."""

    def judge(self, entries: Slots) -> Float[Array, "B H M"]:
        """Returns scores; the lowest leave first, and +inf stays."""

    def victims(self, scores: Float[Array, "B H M"], positions: Int[Array, "B H M"]) -> Int[Array, "B H count"]:
        """Returns the indices of the `count` entries of each head that leave first, M where there is none."""

    def release(self, entries: Slots, lost: Bool[Array, "B H S"]) -> Slots:
        """Returns the entries without those that are lost. Only called with all entries of a head."""


class Entries(ABC):
    """The entries of all layers: `Layers`, each with its own slots, or `Segments` of one pool.

    Attributes:
        preallocates: whether slots for tokens to come must be there before the tokens are read. If not, reading
            appends them.
    """

    preallocates: ClassVar[bool]

    @abstractmethod
    def __len__(self) -> int:
        """Returns L, the number of layers."""

    @property
    @abstractmethod
    def stored(self) -> tuple[Stored, Values]:
        """Keys and values of some entries in their stored form, which that of a new entry follows."""

    @property
    @abstractmethod
    def heads(self) -> tuple[KvHeads, ...]:
        """The kv heads of each layer."""

    @property
    @abstractmethod
    def bounds(self) -> tuple[int, ...]:
        """The static upper bound of the slots that any head of each layer occupies."""

    # One layer.

    def __getitem__(self, i: int) -> Slots:
        """Returns layer i as slots, as many as any of its heads may occupy."""
        return self.layer(i, self.bounds[i])

    def __iter__(self) -> Iterator[Slots]:
        return (self[i] for i in range(len(self)))

    @abstractmethod
    def layer(self, i: int, slots: int) -> Slots:
        """Returns layer i as slots: its own, or `slots` of them in a layout that has no slots."""

    @abstractmethod
    def with_layer(self, i: int, layer: Slots) -> Self:
        """Returns the same entries, those of layer i replaced."""

    @abstractmethod
    def of_layers(self, first: int, count: int) -> Self:
        """Returns the entries of some layers as those of a model of these layers. A pool keeps all its rows."""

    @abstractmethod
    def with_layers(self, first: int, part: Self) -> Self:
        """Returns the same entries, with what became of `of_layers(first, len(part))`."""

    # A decode step of one layer: make room, write, attend, observe.

    @abstractmethod
    def make_room(self, i: int, incoming: Bool[Array, "B"], room: MakeRoom) -> tuple[Self, Int[Array, "B H"]]:
        """Returns an empty slot for each row's token in layer i, after evicting where heads are full.

        Rows without an incoming token get a slot beyond the last one, where writes are dropped.
        """

    @abstractmethod
    def write(self, i: int, slot: Int[Array, "B H"], key: Stored, value: Values, position: Int[Array, "B H"]) -> Self:
        """Overwrites one slot per row and head of layer i and clears its state; beyond the last one nothing."""

    @abstractmethod
    def attend(self, i: int, query: StepQuery) -> StepAttention:
        """Computes the attention of one query per row over the entries of layer i."""

    @abstractmethod
    def observe(self, i: int, show: Callable[[Slots, Take], tuple[Any, Any]], room: MakeRoom) -> Self:
        """Stores the state (per_slot, per_row) that `show` returns for layer i, or for each piece of it.

        Args:
            show: receives entries, with keys and values as arrays, and a function that takes their part of other
                arrays.
            room: by which room was made in this step.
        """

    @abstractmethod
    def exchange(self, change: Callable[[Sequence[Any]], Sequence[Any]]) -> Self:
        """Stores the states per row that `change` returns for all layers, from those that they have."""

    # Sizes.

    @abstractmethod
    def usage(self) -> Usage:
        """Returns how full the layers are, as arrays."""

    @abstractmethod
    def slots_after(
        self,
        occupied: Sequence[int],
        *,
        new: int,
        room: Sequence[int],
        kept: Sequence[int | None],
        windows: Sequence[int | None],
    ) -> tuple[int, ...]:
        """Returns the slots that each layer needs to read `new` tokens.

        Args:
            occupied: of each layer now.
            room: slots for tokens to come after these.
            kept: the number of entries that compression leaves at most; None where the layer is not compressed.
            windows: sliding windows, which bound what a layer needs.
        """

    @abstractmethod
    def growth(self, usage: Usage, room: Sequence[int], *, windows: Sequence[int | None]) -> tuple[int, ...] | None:
        """Returns the argument of `grow` that leaves `room` empty slots in each layer; None if it has them."""

    @abstractmethod
    def grow(self, size: tuple[int, ...]) -> Self:
        """Returns the same entries with more slots, as `growth` counted them."""

    @abstractmethod
    def filling(self, grows: Sequence[bool], windows: Sequence[int | None]) -> tuple[bool, ...]:
        """Returns whether decoding can run out of slots in each layer."""

    @property
    @abstractmethod
    def mean_slots(self) -> tuple[int, ...]:
        """The number of slots that each layer has for a kv head, in the mean; one number for a pool."""

    @abstractmethod
    def held(self) -> Float[Array, "B L"]:
        """Returns the number of entries of each row and layer, in the mean over kv heads."""

    # Whole caches.

    @abstractmethod
    def private(self) -> Self:
        """Returns the same with copies of the arrays that a program may hand through and a later one donates."""

    @abstractmethod
    def by_head(self, row: int, arrays: Any = None) -> list[list[Any]]:
        """Returns the positions of each head of each layer in one row of the batch; on the host.

        Args:
            arrays: others to divide in their place: a list of one array for each layer, or of the one of a pool.
        """


def statics(entries: Entries) -> dict[str, Any]:
    """Returns the static facts of the layout, for saved caches."""
    return {field.name: getattr(entries, field.name) for field in fields(entries) if field.metadata.get("static")}  # type: ignore[arg-type]
