"""The selection of the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import lowest_tokens, top_tokens
from kvjax.policy import Ranked, Select


@dataclass(frozen=True)
class TopTokens(Select):
    """Each head retains its own highest scores; of equal scores the earlier position."""

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "scores"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        return top_tokens(ranked.scores, ranked.positions, ranked.counts, size=ranked.size)

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        """The lowest scores; of equal scores the later position, so that victims are the complement of `keep`."""
        return lowest_tokens(scores, positions, count=count)
