"""AdaKV's budgets: the heads of a layer compete for the entries that they have together."""

from __future__ import annotations

import fractions
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.protocols import Budget, SharedBudget, check_integer

from .shared import check_layers_alike, raise_best


@dataclass(frozen=True)
class AdaptiveShares(SharedBudget):
    """Each layer keeps its own total, of which a head gets what it has among the layer's best entries, but not all.

    With n entries for the mean head, s of them protected, b = n - s, and c_h the entries of head h among the H b best
    unprotected ones of a group of H heads, head h keeps s and

        "paper":    alpha b + (1 - alpha) c_h, rounded down, what is then missing to H b going to the largest remainders
        "code":     round(floor(alpha b) + (1 - alpha) c_h) as released, whose sum may miss H b, or exceed it by H / 2
        "kvpress":  what it has among the H n best of all, once each head's floor(alpha n) best are raised above all
                    others, at least one unless alpha is 0

    On a mesh nothing is communicated: a group of heads lies on one device.

    Attributes:
        budget: entries of the mean kv head, in every layer: Fixed or Fraction.
        alpha: the part of the budget for which heads do not compete.
        normalise: whether a head's scores are first multiplied by the part of their sum that its b best make up, so
            that a head whose attention is spread thin asks for less. It takes scores that are not negative.
        formula: see above.
        groups: how many groups of consecutive kv heads compete, each for its own total; the number of devices that kv
            heads are spread over must divide it. 1: all heads of a layer compete.
    """

    budget: Budget
    alpha: float = 0.2
    normalise: bool = True
    formula: Literal["paper", "code", "kvpress"] = "paper"
    groups: int = 1

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        check_layers_alike(self)
        if isinstance(self.alpha, str | bool) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r}: accepted is a number from 0 to 1")
        if self.formula not in ("paper", "code", "kvpress"):
            raise ValueError(f"formula={self.formula!r}: accepted are 'paper', 'code' and 'kvpress'")

    def entries(self, slots: Sequence[int], heads: int) -> int:
        rounded_up = heads // 2 if self.formula == "code" else 0
        return sum(heads * count + rounded_up for count in slots)

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, M = scores.shape
        groups = self.groups // heads.kv_devices()
        competing = scores.reshape(L * B * groups, H // groups, M)
        n = jnp.repeat(jnp.tile(mean, L), groups)[:, None]
        protected = jnp.isposinf(competing)
        s = jnp.sum(protected, axis=-1)
        b = jnp.maximum(n - s, 0)
        if self.normalise:
            competing = competing * _mass_of_best(jnp.where(protected, -jnp.inf, competing), b)[..., None]
        alpha = fractions.Fraction(self.alpha).limit_denominator(1000)
        if self.formula == "kvpress":
            safe = jnp.maximum(n[:, 0] * alpha.numerator // alpha.denominator, alpha > 0)
            competing = raise_best(competing, jnp.maximum(safe, least))
            counts = top_counts(competing, jnp.sum(jnp.broadcast_to(n, s.shape), axis=-1))
        else:
            competing = jnp.where(protected, -jnp.inf, raise_best(competing, least))
            c = top_counts(competing, jnp.sum(b, axis=-1))
            mixed = _released if self.formula == "code" else _exact
            counts = s + mixed(b, c, alpha.numerator, alpha.denominator)
        return counts.reshape(L, B, H)


def _mass_of_best(scores: Float[Array, "R H M"], count: Int[Array, "R H"]) -> Float[Array, "R H"]:
    """The part of each head's sum of scores that its `count` best make up; 1 where that sum is 0."""
    ordered = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
    ordered = jnp.where(ordered > -jnp.inf, ordered, 0.0)
    best = jnp.sum(jnp.where(jnp.arange(ordered.shape[-1]) < count[..., None], ordered, 0.0), axis=-1)
    total = jnp.sum(ordered, axis=-1)
    return jnp.where(total > 0, best / jnp.where(total > 0, total, 1.0), 1.0)


def _exact(b: Int[Array, "R H"], c: Int[Array, "R H"], part: int, whole: int) -> Int[Array, "R H"]:
    """b part / whole + c (1 - part / whole), in integers with the same sum."""
    scaled = b * part + c * (whole - part)
    floor, remainder = scaled // whole, scaled % whole
    missing = jnp.sum(remainder, axis=-1, keepdims=True) // whole
    rank = jnp.argsort(jnp.argsort(-remainder, axis=-1, stable=True), axis=-1)
    return floor + (rank < missing)


def _released(b: Int[Array, "R H"], c: Int[Array, "R H"], part: int, whole: int) -> Int[Array, "R H"]:
    """The same, each head rounded for itself: half to even."""
    scaled = c * (whole - part)
    floor, twice = b * part // whole + scaled // whole, 2 * (scaled % whole)
    return floor + ((twice > whole) | ((twice == whole) & (floor % 2 == 1)))
