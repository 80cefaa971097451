"""AdaKV (Feng et al., arXiv 2407.11550): lets the heads of a layer compete for the layer's entries.

Differences from the paper and its code:

- The heads that compete are kv heads, since entries are stored per kv head.
- A head retains alpha b + (1 - alpha) c of its layer's best, rounded so that the layer's total is exact.
  `formula="code"` is as released: each head is rounded for itself, and the total may be missed.
- `formula="kvpress"` is as in kvpress: each head's floor(alpha n) best of n are safe, then the layer's best are
  retained. Scores are not normalised, but compared as they are.
"""

from __future__ import annotations

import fractions
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.policy import (
    AllocatedBudget,
    Budget,
    Layout,
    Policy,
    check_choice,
    check_integer,
    check_kind,
    ratio_of,
    share_of,
)

from .common.allocation import check_limited, check_share, raise_best
from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()


@dataclass(frozen=True)
class AdaptiveShares(AllocatedBudget):
    """Each layer retains its own total, of which each head gets a fixed part and the part that it wins by its scores.

    With n entries for the mean head of a layer, s of them protected, b = n - s, and c_h the number of head h's entries
    among the H b best unprotected ones of a group of H heads, head h retains s and

        "paper":    alpha b + (1 - alpha) c_h, rounded down; entries then missing to H b go to the largest remainders
        "code":     round(floor(alpha b) + (1 - alpha) c_h) as released; the sum may miss H b, or exceed it by H / 2
        "kvpress":  its part of the H n best of all, once each head's floor(alpha n) best are raised above all others,
                    at least one unless alpha is 0

    n is the `budget` of each layer. If that budget is allocated itself, such as DynamicKV's, it is allocated first,
    by scores that are not normalised. On a mesh the heads' competition communicates nothing, because a group of heads
    lies on one device.

    Attributes:
        budget: entries of the mean kv head of each layer: a budget that limits every layer, or an allocated one for
            which all heads of a layer retain the same number.
        alpha: the part of the budget for which heads do not compete.
        normalise: whether a head's scores are first multiplied by the part of their sum that its b best make up, so
            that a head whose attention is spread over many tokens wins less. The scores must be amounts >= 0.
        formula: see above. "kvpress" compares scores as they are, with `normalise=False`.
        groups: the number of groups of consecutive kv heads that compete, each for its own total. The number of devices
            that kv heads are divided over must divide it. 1: all heads of a layer compete.

    Raises:
        ValueError: for a value or a budget that is not accepted, and, in a policy, for normalise=True with scores that
            may be negative or have an order only.
    """

    alpha: float = 0.2
    normalise: bool = True
    formula: Literal["paper", "code", "kvpress"] = "paper"
    groups: int = 1

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        check_share("alpha", self.alpha)
        check_choice("formula", self.formula, "paper", "code", "kvpress")
        if self.normalise and self.formula == "kvpress":
            raise ValueError(
                "normalise=True with formula='kvpress', which compares scores as they are: expected normalise=False"
            )
        _check_heads_alike(self.budget)

    def check(self, policy: Policy) -> None:
        marks, scores = policy.score.needs.marks, f"the scores of {type(policy.score).__name__}"
        why = f"of {scores} only the order means something" if "ordinal" in marks else ""
        why = why or (f"{scores} may be negative" if "signed" in marks else "")
        if self.normalise and why:
            raise ValueError(
                f"normalise=True takes parts of the sum of a head's scores, and {why}: expected normalise=False"
            )

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups)

    @property
    def allocated(self) -> AllocatedBudget | None:
        """The budget, if it is allocated itself."""
        return None if self.budget.layout is None else cast(AllocatedBudget, self.budget)

    def entries(self, means: Sequence[int], sizes: Sequence[int], heads: int) -> int:
        of_base = super().entries if self.allocated is None else self.allocated.entries
        rounded_up = heads // 2 if self.formula == "code" else 0
        return of_base(means, sizes, heads) + rounded_up * len(means)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, M = scores.shape
        if self.allocated is not None:
            means = self.allocated.allocate(scores, means, least, heads)[..., 0]
        groups = self.groups // heads.kv_devices()
        competing = scores.reshape(L * B * groups, H // groups, M)
        n = jnp.repeat(means.reshape(-1), groups)[:, None]
        protected = jnp.isposinf(competing)
        s, held = jnp.sum(protected, axis=-1), jnp.sum(competing > -jnp.inf, axis=-1)
        b = jnp.maximum(n - s, 0)
        if self.normalise:
            competing = competing * _mass_of_best(jnp.where(protected, -jnp.inf, competing), b)[..., None]
        alpha = ratio_of(self.alpha)
        if self.formula == "kvpress":
            safe = jnp.maximum(share_of(alpha, n[:, 0]), alpha > 0)
            competing = raise_best(competing, jnp.maximum(safe, least)[:, None])
            counts = top_counts(competing, jnp.sum(jnp.broadcast_to(n, s.shape), axis=-1))
        else:
            free = jnp.where(protected, -jnp.inf, competing)
            c = top_counts(raise_best(free, jnp.maximum(least - s, 0)) if least else free, jnp.sum(b, axis=-1))
            mixed = _released if self.formula == "code" else _exact
            counts = s + mixed(b, c, alpha)
            fits = jnp.max(held - n, axis=-1, keepdims=True) <= 0  # then no rounding leaves an entry out
            counts = jnp.maximum(counts, jnp.where(fits, held, 0))
        return counts.reshape(L, B, H)


def _check_heads_alike(budget: Budget) -> None:
    """Raises ValueError unless the heads of each layer have the same budget, for which they can compete."""
    check_kind("budget", budget, Budget)
    layout = budget.layout
    if layout is None:
        check_limited(budget)
    elif layout.groups is not None:
        raise ValueError(
            f"a budget of {budget}, under which each head has a number of its own already: expected one for which all "
            "heads of a layer retain the same number"
        )
    elif any(layout.dense) or layout.compares_protected:
        raise ValueError(
            f"a budget of {budget}, which has layers that retain everything, or compares protected entries too: "
            "expected one that limits every layer and compares unprotected entries only"
        )


def _mass_of_best(scores: Float[Array, "B H M"], count: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """Returns the part of each head's sum of scores that its `count` best make up; 1 where that sum is 0."""
    ordered = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
    ordered = jnp.where(ordered > -jnp.inf, ordered, 0.0)
    best = jnp.sum(jnp.where(jnp.arange(ordered.shape[-1]) < count[..., None], ordered, 0.0), axis=-1)
    total = jnp.sum(ordered, axis=-1)
    return jnp.where(total > 0, best / jnp.where(total > 0, total, 1.0), 1.0)


def _exact(b: Int[Array, "B H"], c: Int[Array, "B H"], alpha: fractions.Fraction) -> Int[Array, "B H"]:
    """Returns alpha b + (1 - alpha) c in integers that have the same sum; the largest remainders are rounded up."""
    floor, remainder = _weighed(b, c, alpha)
    missing = jnp.sum(remainder, axis=-1, keepdims=True) // alpha.denominator
    rank = jnp.argsort(jnp.argsort(-remainder, axis=-1, stable=True), axis=-1)
    return floor + (rank < missing)


def _released(b: Int[Array, "B H"], c: Int[Array, "B H"], alpha: fractions.Fraction) -> Int[Array, "B H"]:
    """Returns floor(alpha b) + (1 - alpha) c, each head rounded for itself, half to even."""
    unit = alpha.denominator
    own, remainder = _weighed(jnp.zeros_like(b), c, alpha)
    floor, twice = share_of(alpha, b) + own, 2 * remainder
    return floor + ((twice > unit) | ((twice == unit) & (floor % 2 == 1)))


def _weighed(
    b: Int[Array, "B H"], c: Int[Array, "B H"], alpha: fractions.Fraction
) -> tuple[Int[Array, "B H"], Int[Array, "B H"]]:
    """Returns alpha b + (1 - alpha) c rounded down, and what is left in parts of alpha's denominator."""
    part, unit = alpha.numerator, alpha.denominator
    rest = b % unit * part + c % unit * (unit - part)
    return b // unit * part + c // unit * (unit - part) + rest // unit, rest % unit


@preset
def adakv(
    base: Policy = SNAPKV,
    alpha: float = 0.2,
    normalise: bool | None = None,
    formula: Literal["paper", "code", "kvpress"] = "paper",
    groups: int = 1,
) -> Policy:
    """Lets the kv heads of each layer compete for the base's budget by the base's scores, once a prompt has been read.

    Of the b unprotected entries of the mean head of a layer with H heads, head h has c_h among the layer's H b best:

        unprotected entries of head h = alpha * b + (1 - alpha) * c_h

    This is Algorithm 1 with its safeguard. Decoding is the base's own: the answer is added, or each head evicts within
    its number.

    Variants, as text:

    - `adakv:base=pyramidkv,base.budget=1024` is Ada-PyramidKV: heads compete for the budget of their layer, which falls
      from layer to layer.
    - `adakv:base=dynamickv,base.budget=1024` lets layers share the budget first, then the heads of each layer.
    - `adakv:base=criticalkv,base.base=snapkv,base.base.budget=1024` is CriticalAdaKV: the base's scores decide how many
      entries each head retains, and both stages of CriticalKV fill that number.
    - `adakv:base=snapkv,formula=kvpress` is AdaKV as in kvpress.

    Args:
        base: the policy that scores and protects. Its budget is that of the mean head of each layer: an integer, a
            float, PyramidKV's, or an allocated one for which the heads of a layer retain equally many (DynamicKV's).
        alpha: the part of the budget that no head loses, from 0 to 1 (the released default; the paper's tables: 0.2).
        normalise: whether a head's scores are multiplied by the part of their sum that its b best make up, as released.
            The scores must be amounts >= 0. None: True, and False for formula="kvpress".
        formula: "paper", "code" (as released) or "kvpress", which raises each head's floor(alpha n) best of n above all
            others and then retains the best of all.
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.

    Raises:
        ValueError: for a value that is not accepted, for normalise=True with formula="kvpress" or with scores that may
            be negative or have an order only, and for a base whose heads have different numbers of entries already or
            must retain the same tokens, or whose layers retain everything.
    """
    check_kind("base", base, Policy)
    if normalise is None:
        normalise = formula != "kvpress"
    return replace(base, budget=AdaptiveShares(base.budget, alpha, normalise, formula, groups))
