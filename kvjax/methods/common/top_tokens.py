"""The selection of the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.pallas_kernels import lowest_tokens, top_tokens
from kvjax.policy import ByQueryHead, Select


@dataclass(frozen=True)
class TopTokens(Select):
    """Each head retains its own highest scores; of equal scores the earlier position."""

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "scores"

    def keep(
        self,
        scores: Float[Array, "B H M"],
        positions: Int[Array, "B H M"],
        counts: Int[Array, "B H"],
        size: int,
        heads: Heads = ALL_HEADS,
        by_query_head: ByQueryHead | None = None,
    ) -> Int[Array, "B H size"]:
        return top_tokens(scores, positions, counts, size=size)

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        """The lowest scores; of equal scores the later position, so that victims are the complement of `keep`."""
        return lowest_tokens(scores, positions, count=count)
