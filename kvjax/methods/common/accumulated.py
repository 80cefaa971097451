"""The attention that entries have received from all queries so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction
from kvjax.policy import Attended, LayerShape, Moment, Needs, Received, Score, check_choice


@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """The sum over all queries of the prompt and the answer of the attention that an entry received from them.

    Attributes:
        group: the reduction over the query heads of a kv head, which comes before the sum over queries.
    """

    group: Literal["mean", "sum", "max"] = "mean"

    def __post_init__(self) -> None:
        check_choice("group", self.group, "mean", "sum", "max")

    @property
    def needs(self) -> Needs:
        received = Received(Reduction(rows="sum", group=self.group, first="group"))
        return Needs(received=received, slotwise=True, marks=frozenset({"accumulates"}))

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], None]:
        return shape.per_slot(), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        return entries.per_slot + attended.received, None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot
