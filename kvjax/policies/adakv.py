"""AdaKV (Feng et al., arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.parts import AdaptiveShares, KeyDifference, KeyNorm
from kvjax.policy import Policy

from .snapkv import snapkv

SNAPKV = snapkv()


def adakv(
    base: Policy = SNAPKV,
    alpha: float = 0.2,
    normalise: bool = True,
    formula: Literal["paper", "code", "kvpress"] = "paper",
    groups: int = 1,
) -> Policy:
    """Lets the kv heads of each layer compete for the base's budget by the base's scores, once a prompt is read.

    Of a layer's H heads with b entries each beside the protected ones, head h has c_h among the H b best and keeps
    alpha b + (1 - alpha) c_h (Algorithm 1 and its safeguard), each layer the same in all. The sum is exact here; as
    released, heads are rounded one by one and it may miss. Decoding is the base's own: what is generated comes on
    top, or each head evicts within what it was given.

    Args:
        base: the policy that scores and protects; its budget, an integer or a float, is that of the mean head.
        alpha: the part of the budget that no head loses (the released default; the paper's tables: 0.2).
        normalise: a head's scores are multiplied by the part of their sum that its b best make up, as released. It
            takes scores that are not negative.
        formula: "paper", "code" (as released) or "kvpress", which raises each head's floor(alpha n) best of n above
            all others and then keeps the best of all; it takes normalise=False.
        groups: groups of consecutive kv heads that compete among themselves. On a mesh that spreads kv heads over D
            devices it must be a multiple of D; one device with as many groups keeps the same.
    """
    if normalise and isinstance(base.score, KeyDifference | KeyNorm):
        raise ValueError(
            f"normalise=True takes the mass of a head's scores, and those of {type(base.score).__name__} may be "
            "negative; accepted with it is normalise=False"
        )
    return replace(base, budget=AdaptiveShares(base.budget, alpha, normalise, formula, groups))
