"""StreamingLLM (Xiao et al., arXiv 2309.17453): attention sinks and the most recent tokens."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import Drop, Recency, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def streaming_llm(
    budget: int | float = 1024,
    sinks: int = 4,
    positions: Literal["original", "in_cache"] = "original",
    every: int | None = 1,
) -> Policy:
    """The first `sinks` tokens and the newest others, at the prompt and at every decoded token.

    Args:
        budget: what a query sees, sinks and itself included (the paper's start size + recent size); a float is that
            share of each row's prompt.
        sinks: the first tokens, always kept.
        positions: "in_cache" is the paper's form, which caches keys before RoPE and rotates them by their place in the
            cache, so that no distance exceeds the budget however long the text. "original" keeps each token at its own
            position, as the ports for long prompts do.
        every: evict so many tokens at a time; None compresses the prompt only.
    """
    return Policy(
        score=Recency(),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
        every=every,
        positions=positions,
    )
