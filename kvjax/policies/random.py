"""Tokens drawn at random: the floor that every method must beat."""

from __future__ import annotations

from kvjax.parts import Drop, RandomDraw, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def random(
    budget: int | float = 1024, seed: int = 0, sinks: int = 0, recent: int = 0, every: int | None = None
) -> Policy:
    """Keeps a uniform sample of the tokens, another one in each layer and kv head.

    A token's draw depends on the seed, the layer, the kv head and its position, so a row keeps the same in any company
    and however its prompt is cut. With `every` what is kept is a uniform sample of all tokens so far, at every step.

    Args:
        budget: entries kept of the prompt; a float is that share of each row's prompt.
        seed: of the draws, an integer >= 0.
        sinks: first tokens kept in any case.
        recent: newest tokens kept in any case.
        every: evict while decoding as well, so many tokens at a time; the budget then bounds what a query sees.
    """
    return Policy(
        score=RandomDraw(seed),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
