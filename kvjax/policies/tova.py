"""TOVA, token omission via attention (Oren et al., arXiv 2401.06104)."""

from __future__ import annotations

from kvjax.parts import Drop, LastAttention, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def tova(budget: int | float = 1024, recent: int = 0, every: int | None = 1) -> Policy:
    """Drops the token that received the least attention from the last query, averaged over all heads of the layer.

    All heads of a layer keep the same tokens. The token that attended last competes with the others.

    Args:
        budget: what a query sees, itself included (the paper's cache size + 1 while decoding, cache size at the
            prompt). A float is that share of each row's prompt.
        recent: tokens kept whatever they received; 1 forces the last one in.
        every: evict so many tokens at a time; None compresses the prompt only.
    """
    return Policy(
        score=LastAttention(),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=recent),
        every=every,
    )
