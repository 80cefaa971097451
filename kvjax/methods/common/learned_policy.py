"""The policy that `kvzap` and `fastkvzip` have in common."""

from __future__ import annotations

from typing import Literal

from kvjax.methods.adakv import AdaptiveShares
from kvjax.policy import AllocatedBudget, Budget, Policy, Protect, check_choice

from .budgets import budget_of
from .global_shares import GlobalShares
from .learned import LearnedScore


def learned(
    gates: str,
    budget: int | float,
    protect: Protect,
    every: int | None,
    level: Literal["global", "layer", "head"],
    groups: int,
) -> Policy:
    """The policy of a method whose networks have that name. The options are those of `kvzap`."""
    check_choice("level", level, "global", "layer", "head")
    if groups != 1 and level == "head":
        raise ValueError(f"groups={groups} with level='head', where no heads compete: expected groups=1")
    entries = budget_of(budget)
    shared: dict[str, AllocatedBudget | Budget] = {"head": entries}
    if level == "global":
        shared["global"] = GlobalShares(entries, groups)
    elif level == "layer":
        shared["layer"] = AdaptiveShares(entries, alpha=0.0, normalise=False, groups=groups)
    return Policy(
        score=LearnedScore(gates),
        budget=shared[level],
        protect=protect,
        every=every,
    )
