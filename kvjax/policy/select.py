"""Selections: which entries fill a budget, given their scores."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.pallas_kernels import lowest_tokens, top_tokens

from .part import Part


class Ranked(NamedTuple):
    """Entries, or chunks or pages of them, some of which a selection retains.

    Attributes:
        scores: +inf for protected entries, -inf for empty slots.
        positions: the token position in each slot, -1 if the slot is empty.
        counts: the number of entries that each head retains.
        size: the largest count.
        heads: the heads that the entries belong to.
        entries: the entries as their score saw them, with its state, for a selection that knows this state. None where
            chunks or pages are ranked.
    """

    scores: Float[Array, "B H M"]
    positions: Int[Array, "B H M"]
    counts: Int[Array, "B H"]
    size: int
    heads: Heads = ALL_HEADS
    entries: Slots | None = None


class Select(Part):
    """Chooses entries by scores that are +inf for protected entries and -inf for empty slots."""

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        """The criterion. "scores": the highest scores are retained one by one, whatever an entry stands for.

        "means": means of the scores of several entries, which must be on the scale on which the method defines them.
        "other": anything else.
        """
        return "other"

    @abstractmethod
    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        """Returns the indices of the entries to retain, `counts` of each head, ascending, -1 after the last."""

    @abstractmethod
    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        """Returns the indices of `count` entries to evict while decoding, S for none. Scores of +inf stay."""


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
        """Evicts the lowest scores; of equal scores the later position, so that victims complement `keep`."""
        return lowest_tokens(scores, positions, count=count)


@dataclass(frozen=True)
class SelectWrapper(Select):
    """A selection that compresses prompts in its own way and leaves evictions while decoding to another one.

    Attributes:
        base: the selection that evicts.
    """

    base: Select

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        return self.base.victims(scores, positions, count)
