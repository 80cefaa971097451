"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118): what mattered goes on to matter."""

from __future__ import annotations

from kvjax.parts import Drop, Neglect, TopTokens, budget_of
from kvjax.policy import Policy, Protect
from kvjax.protocols import check_integer


def scissorhands(budget: int = 1024, window: int = 400, recent: int = 10, drop: float = 0.5) -> Policy:
    """Drops half of a full cache at once: the tokens that received less than the mean from the most of recent queries.

    I[h, c] = number of the last `window` queries r whose weight on c, mean of the query group, is below 1 / (tokens
    that r saw); those with the largest I go, of equal ones the later, never the `recent` newest. The paper may give
    layers budgets of their own; here all have the same. No code of its authors is known: its constants are those of
    ports.

    Args:
        budget: what a query sees at most, itself included.
        window: queries whose judgement counts, the paper's w.
        recent: the newest tokens, always kept, the paper's r.
        drop: the share of the budget that is dropped at once, the paper's m / B.
    """
    check_integer("budget", budget, least=1)
    if isinstance(drop, bool) or not isinstance(drop, int | float) or not 0 < drop < 1:
        raise ValueError(f"drop={drop!r}: accepted is a share of the budget above 0 and below 1")
    return Policy(
        score=Neglect(window),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=recent),
        every=max(1, int(budget * drop)),
    )
