"""The entries that a preset's docstring promises, computed without its budget's code."""

from __future__ import annotations

from kvjax.parts import PerLayer, Pyramid
from kvjax.policy import Policy


def budget_of(policy: Policy, layer: int, length: int) -> int | None:
    """The entries that a head of one of two layers retains of a prompt of `length` tokens; None without a limit.

    An allocated budget gives the mean head's.
    """
    if not policy.limited(layer):
        return None
    budget = getattr(policy.budget, "budget", policy.budget)
    entries = getattr(budget, "entries", None) or int(budget.share * length)
    if isinstance(policy.budget, Pyramid):  # the last layer has 1/beta of the mean, the first one the rest
        window, steepness = policy.budget.window, policy.budget.beta
        low = max(entries - window, 0) // steepness
        levels = [2 * (entries - window) - low, low]
        if policy.budget.formula == "code":
            if levels[0] >= length - window:
                levels = [length - window, 2 * (entries - window) - (length - window)]
            if length < max(2 * (entries - window), entries):
                levels = [entries - window] * 2
        entries = levels[layer] + window
    if isinstance(policy.budget, PerLayer):
        share = round(policy.budget.shares[layer] * 100)
        entries = entries * share // 100
        entries = min(entries, length) if hasattr(budget, "share") else entries
    return max(entries, policy.minimum)
