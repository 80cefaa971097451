"""H2O, heavy-hitter oracle (Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import AccumulatedAttention, Drop, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def h2o(
    budget: int | float = 1024,
    recent: int | float = 0.5,
    group: Literal["mean", "sum", "max"] = "mean",
    every: int | None = 1,
) -> Policy:
    """Recent tokens and heavy hitters: those that received the most attention from all queries so far.

    score[h, c] = sum over every query row of the prompt and the answer of the softmax weight on c, reduced over the
    query group. True accumulation: all N rows of the prompt count, not a window of them.

    Args:
        budget: what a query sees, itself included; the paper's heavy size + recent size + 1 while decoding, heavy +
            recent at the prompt. A float is that share of each row's prompt.
        recent: tokens kept for being recent; a float is that share of the budget (the paper: half).
        group: how the query heads of a kv head are reduced; the paper has one of each.
        every: evict so many tokens at a time; None compresses the prompt only.
    """
    return Policy(
        score=AccumulatedAttention(group),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=recent),
        every=every,
    )
