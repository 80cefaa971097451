"""The L2 norm of keys (Devoto et al., EMNLP 2024, arXiv 2406.11430)."""

from __future__ import annotations

from kvjax.parts import Drop, KeyNorm, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def knorm(budget: int | float = 1024, sinks: int = 0, recent: int = 0, every: int | None = None) -> Policy:
    """Keeps the tokens with the smallest keys: score[h, c] = -|k_c|, which RoPE does not change.

    Needs no attention weights and no state. The paper leaves its first two layers uncompressed
    (`DenseLayers(budget_of(...), first=2)` as the policy's budget does); kvpress compresses all, as this does.

    Args:
        budget: entries kept of the prompt; a float is that share of each row's prompt.
        sinks: first tokens kept whatever their norm.
        recent: newest tokens kept whatever their norm.
        every: evict while decoding as well, so many tokens at a time; the budget then bounds what a query sees.
    """
    return Policy(
        score=KeyNorm(),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
