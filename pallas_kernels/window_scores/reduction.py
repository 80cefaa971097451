"""Reduces the attention that a key received from many queries to one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..arrays import Fold


@dataclass(frozen=True)
class Reduction:
    """The reduction of the softmax weights [G, W] of a key to one score.

    Attributes:
        rows: the reduction over the W queries. "mean" divides by the number of queries that see the key.
        group: the reduction over the G query heads of the kv head. "none" keeps them apart: a score for each.
        first: the axis that is reduced first. The order matters only if one of the reductions is "max".

    Raises:
        ValueError: for other values.
    """

    rows: Fold = "sum"
    group: Fold | Literal["none"] = "mean"
    first: Literal["rows", "group"] = "rows"

    def __post_init__(self) -> None:
        if self.rows not in ("sum", "mean", "max"):
            raise ValueError(f"rows={self.rows!r}: expected 'sum', 'mean' or 'max'")
        if self.group not in ("sum", "mean", "max", "none"):
            raise ValueError(f"group={self.group!r}: expected 'sum', 'mean', 'max' or 'none'")
        if self.first not in ("rows", "group"):
            raise ValueError(f"first={self.first!r}: expected 'rows' or 'group'")

    @property
    def of_group(self) -> Fold:
        """The reduction over the group, where query heads are not kept apart."""
        assert self.group != "none"
        return self.group

    @property
    def commutes(self) -> bool:
        """Returns whether the two reductions give the same score in either order, up to rounding."""
        return (self.rows == "max") == (self.group == "max")


DEFAULT_REDUCTION = Reduction()
