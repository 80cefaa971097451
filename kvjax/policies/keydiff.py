"""KeyDiff (Park et al., NeurIPS 2025, arXiv 2504.15364): keys unlike the others."""

from __future__ import annotations

from kvjax.parts import Drop, KeyDifference, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def keydiff(budget: int | float = 1024, sinks: int = 0, recent: int = 0, every: int | None = None) -> Policy:
    """Keeps the keys least similar to the anchor: score[h, c] = -cos(k_c, mean over cached j of k_j / |k_j|).

    Keys are compared after RoPE, as they are cached. The paper reads prompts in blocks and compresses after each:
    that is `chunk=` with `compress="chunk"`; while decoding it is `every`. kvpress compresses once, as is the default.

    Args:
        budget: entries kept of the prompt; a float is that share of each row's prompt.
        sinks: first tokens kept whatever their keys.
        recent: newest tokens kept whatever their keys.
        every: evict while decoding as well, so many tokens at a time; the budget then bounds what a query sees.
    """
    return Policy(
        score=KeyDifference(),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
