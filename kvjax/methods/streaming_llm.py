"""StreamingLLM (Xiao et al., arXiv 2309.17453): retains the attention sinks and the most recent tokens.

Differences from the paper:

- Tokens keep their own positions by default. `positions="in_cache"` is the paper's form: keys are cached before RoPE
  and rotated to their place in the cache.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy, Protect

from .common.budgets import budget_of
from .common.by_position import Recency
from .registry import preset


@preset
def streaming_llm(
    budget: int | float = 1024,
    sinks: int = 4,
    positions: Literal["original", "in_cache"] = "original",
    every: int | None = 1,
) -> Policy:
    """Retains the first `sinks` tokens and the most recent tokens, after the prompt and at every decode step.

        score[c] = position of c

    The first `sinks` positions are protected, so the oldest token behind them is evicted.

    Args:
        budget: the entries that a query sees, sinks and itself included (the paper's start size + recent size). An
            integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        sinks: the number of first tokens, which are always retained.
        positions: "in_cache" is the paper's form: keys are cached before RoPE and rotated to their place in the cache,
            so that no distance exceeds the budget however long the text is. "original" keeps each token at its own
            position, as ports for long prompts do.
        every: the number of tokens that are evicted at a time; None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + `every`.
    """
    return Policy(
        score=Recency(),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
        every=every,
        positions=positions,
    )
