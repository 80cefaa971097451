"""Budgets by the level at which kv heads compete: those of all layers, those of each layer, or none."""

from __future__ import annotations

from typing import Literal

from kvjax.methods.adakv import AdaptiveShares
from kvjax.policy import Budget, check_choice

from .budgets import budget_of
from .shares import GlobalShares


def budget_of_level(
    budget: int | float, level: Literal["global", "layer", "head"], groups: int, *, strict: bool = False
) -> Budget:
    """Returns the budget of a preset at whose level heads compete by their scores as they are.

    Args:
        budget: entries of the mean kv head, as `budget_of` takes them.
        level: "global" for one competition of all heads, "layer" for one in each layer, "head" for none.
        groups: the number of groups of consecutive kv heads that compete among themselves.
        strict: whether the last entry that would fit is a threshold (`GlobalShares.strict`), with level="global".

    Raises:
        ValueError: for a value that is not accepted, and for groups of heads that do not compete.
    """
    check_choice("level", level, "global", "layer", "head")
    if groups != 1 and level == "head":
        raise ValueError(f"groups={groups} with level='head', where no heads compete: expected groups=1")
    entries = budget_of(budget)
    if level == "global":
        return GlobalShares(entries, groups, strict=strict)
    if level == "layer":
        return AdaptiveShares(entries, alpha=0.0, normalise=False, groups=groups)
    return entries
