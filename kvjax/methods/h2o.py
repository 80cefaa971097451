"""H2O, heavy-hitter oracle (Zhang et al., arXiv 2306.14048): retains recent tokens and those with the most attention.

Differences from the paper:

- Entries are stored and chosen per kv head, and `group` reduces the query heads of a kv head. The paper's models have
  one query head per kv head.
- The eviction comes before the next token is written. The paper evicts after a query has attended, which leaves the
  same entries to every query; its cache size C is `budget=C + 1` while decoding.
- Every query of the prompt counts. Ports that score with a window of queries are `snapkv(pool="none")` here.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy, Protect

from .common.accumulated import AccumulatedAttention
from .common.budgets import budget_of
from .registry import preset


@preset
def h2o(
    budget: int | float = 1024,
    recent: int | float = 0.5,
    group: Literal["mean", "sum", "max"] = "mean",
    every: int | None = 1,
    sinks: int = 0,
) -> Policy:
    """Retains recent tokens and heavy hitters: those that received the most attention from all queries so far.

        score[h, c] = sum over all queries r of the prompt and the answer of softmax(q_r . k)_c

    The sum is reduced over the query group of h. All N queries of a prompt count, not a window of them.
    `h2o:budget=672,sinks=32` also retains the first tokens, as in KVCrush's experiments.

    Args:
        budget: the entries that a query sees, itself included: the paper's heavy size + recent size + 1 while decoding,
            heavy size + recent size at the prompt. An integer >= 1, or a float in (0, 1] for that share of each row's
            prompt.
        recent: the number of most recent tokens, which are always retained, or a float in [0, 1) for that share of the
            budget (the paper: half).
        group: the reduction over the query heads of a kv head.
        every: the number of tokens that are evicted at a time while decoding; None compresses the prompt only.
        sinks: the number of first tokens, which are always retained (the paper: 0).

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=AccumulatedAttention(group),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
