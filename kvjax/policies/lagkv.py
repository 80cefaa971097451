"""LagKV (Liang et al., arXiv 2504.04704): tokens unlike the text that follows them."""

from __future__ import annotations

from kvjax.parts import Drop, LagDifference, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def lagkv(
    budget: int | float = 1024, sinks: int = 4, lag: int = 128, cross: bool = False, every: int | None = None
) -> Policy:
    """Keeps of each run of `lag` tokens those that stand out against the next run; no attention is looked at.

    With low and high of each channel over the next run, and x a token's key or value,

        spread[c] = softmax over the run of std over channels of (x_c - low) / (high - low)

    A token's score is its rank in the run by the mean of its key's and its value's spread. The last whole run and what
    follows it have no next run, and stay before all others; of a text of less than sinks + 2 lag tokens the newest
    stay. The paper cuts each run once, to a ratio, as soon as the next one is complete; here the budget says what stays
    when the prompt has been read, as in kvpress, and runs are of the tokens that are cached.

    Args:
        budget: entries kept of the prompt, sinks included; a float is that share of each row's prompt.
        sinks: the first tokens, always kept.
        lag: tokens to a run.
        cross: compare spreads between runs and not ranks, so that runs give up more or fewer tokens.
        every: evict while decoding as well, so many tokens at a time; the budget then bounds what a query sees.
    """
    return Policy(
        score=LagDifference(sinks, lag, cross),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
        every=every,
    )
