"""CriticalKV (Feng et al., arXiv 2502.03805): another policy's scores, weighed with what values do to the output."""

from __future__ import annotations

from dataclasses import replace

from kvjax.parts import ProjectedValues
from kvjax.policy import Policy

from .snapkv import snapkv

SNAPKV = snapkv()


def criticalkv(base: Policy = SNAPKV, first: float = 0.5, epsilon: float = 1e-4) -> Policy:
    """Fills a share of the budget by the base's scores, and the rest by their product with the projected value's norm.

    score[h, c] = (base[h, c] + epsilon) * mean over the group g of |W_O[g] v_c|_1, with W_O[g] the rows of the output
    projection that query head g has. What the base protects is part of the first share. Where the base evicts while
    decoding, it does so by these scores as well, at the cost of an output projection of all that is cached.

    Args:
        base: the policy whose scores, budget and protected tokens these are.
        first: the share of the budget that goes by the base's scores alone (the paper's alpha).
        epsilon: added to the base's scores, so that a token without attention is judged by its value.
    """
    return replace(base, score=ProjectedValues(base.score, first, epsilon))
