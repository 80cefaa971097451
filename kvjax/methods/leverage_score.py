"""LeverageScore, of Compactor (Chari and Van Durme, arXiv 2507.08143): retains keys that are outliers of their head.

Differences from kvpress's LeverageScorePress:

- The Gaussian sketch is a function of the seed, the layer and the kv head, so that a row's result does not depend on
  its batch. kvpress draws one for each row from a global generator.
- Scores stay in [0, 1]. kvpress standardises the scores of a layer, which changes no selection within the layer.
- Scores are rounded to 12 bits of mantissa, so that equal keys tie. Scores that differ by less than 1.2e-4 of their
  size tie too, and the earlier token stays.
- Keys before RoPE are the cached keys rotated back.
"""

from __future__ import annotations

from kvjax.policy import Policy, Protect

from .common.budgets import budget_of
from .common.leverage import LeverageScore
from .registry import preset


@preset
def leverage_score(
    budget: int | float = 1024, sketch: int = 48, seed: int = 0, sinks: int = 0, recent: int = 0
) -> Policy:
    """Compresses the prompt once, by the leverage of keys: tokens whose keys are unlike the others are retained.

        score[h, c] = x_c . (X' X + 0.01)^-1 x_c

    Row c of X is (k_c - mean of k) times a Gaussian matrix [D, sketch], and k are the keys of head h before RoPE. The
    score needs no attention weights. The answer is added to the retained entries.

    Args:
        budget: the number of entries retained of the prompt. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        sketch: the number of columns of the Gaussian matrix. With the head size or more, scores are exact.
        seed: of the Gaussian matrix.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + 1.
    """
    return Policy(
        score=LeverageScore(sketch, seed),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
    )
