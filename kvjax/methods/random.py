"""Random draw (no paper): retains a uniform sample of the tokens, the baseline that every method must beat."""

from __future__ import annotations

from kvjax.policy import Policy, Protect

from .common.budgets import budget_of
from .common.by_position import RandomDraw
from .registry import preset


@preset
def random(
    budget: int | float = 1024, seed: int = 0, sinks: int = 0, recent: int = 0, every: int | None = None
) -> Policy:
    """Retains a uniform sample of the tokens, a different one in each layer and kv head.

        score[h, c] = uniform number in [0, 1) drawn by (seed, layer, h, position of c)

    A row retains the same tokens in any batch, and however its prompt is cut into chunks. With `every`, the retained
    entries are at every step a uniform sample of all tokens so far.

    Args:
        budget: the number of entries retained of the prompt per kv head. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        seed: the seed of the draws, an integer >= 0.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=RandomDraw(seed),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
