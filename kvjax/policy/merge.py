"""Merges: what becomes of the entries that are not retained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots

from .part import Part
from .score import LayerShape, Moment
from .select import Ranked

Keep: TypeAlias = Callable[[Ranked], Int[Array, "B H size"]]
"""A function that returns the indices of the entries that a selection retains."""


@dataclass(frozen=True)
class Effects:
    """The facts of a merge.

    Attributes:
        at_prompt: whether `compress` puts entries that are not retained into others, or changes values.
        at_steps: whether `absorb` does so while decoding, for which it receives all entries of a head.
        keys: whether the retained entries get other keys, with which stored queries score no longer as they attended.
        bias: whether entries get a bias that is added to their logits, `Slots.bias`.
    """

    at_prompt: bool = False
    at_steps: bool = False
    keys: bool = False
    bias: bool = False

    @property
    def merges(self) -> bool:
        """Tells whether entries go into others, of a prompt or while decoding."""
        return self.at_prompt or self.at_steps


@dataclass(frozen=True)
class Merge(Part):
    """Decides about entries that are not retained. It drops them, unless a subclass merges them."""

    @property
    def effects(self) -> Effects:
        """The facts of this merge."""
        return Effects()

    def init(self, shape: LayerShape) -> Any:
        """Returns the merge's own state in a layer, with axes [B, H, ...]: `Slots.merging`."""
        return None

    def compress(
        self, entries: Slots, moment: Moment, ranked: Ranked, keep: Keep
    ) -> tuple[Slots, Int[Array, "B H size"]]:
        """Compresses a prompt that has been read: the changed entries, and the indices of those to retain.

        Args:
            ranked: the entries with their scores, and how many to retain.
            keep: returns the indices that the policy's selection retains.
        """
        return entries, keep(ranked)

    def absorb(
        self, entries: Slots, moment: Moment, scores: Float[Array, "B H S"], lost: Bool[Array, "B H S"], count: int
    ) -> tuple[Slots, Bool[Array, "B H S"]]:
        """Merges while decoding: the changed entries, and those that leave.

        Args:
            scores: as the policy's score computes them, finite for protected entries too.
            lost: the entries that the policy's selection evicts, `count` of a head or none.
        """
        return entries, lost


@dataclass(frozen=True)
class Drop(Merge):
    """Entries that are not retained are dropped."""
