"""Budgets that are shared out to each prompt in its own way, by comparing the scores of all layers."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.protocols import SharedBudget, check_integer

from .budget import Fixed, Fraction


@dataclass(frozen=True)
class CompositeShares(SharedBudget):
    """KVCompose's: the k-th best entries of all kv heads form composite k of a layer, and layers compete with those.

    A composite's importance is the mean of its entries' scores; the L * mean best of all layers' composites are kept,
    so that each layer keeps as many entries in all of its heads (equations 17 to 24). On a mesh the mean over heads is
    taken once a prompt.

    Attributes:
        budget: entries of the mean layer.
        min_tokens: no layer keeps fewer, as far as it has them; out of the same total. 0 may leave a layer empty.
        first_layer: as the released code has it, the composites of the first layer are raised to the largest of the
            same rank in any layer.
    """

    budget: Fixed | Fraction
    min_tokens: int = 0
    first_layer: bool = False

    def __post_init__(self) -> None:
        check_integer("min_tokens", self.min_tokens, least=0)
        check_layers_alike(self)
        if (smallest := self.budget.smallest) is not None and smallest < self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} of a mean of {smallest}; accepted is no more than that")

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H = scores.shape[:3]
        ranked = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        composites = heads.mean(jnp.moveaxis(ranked, 0, 2))[:, 0]
        if self.first_layer:
            composites = composites.at[:, 0].max(jnp.max(composites, axis=1))
        composites = raise_best(composites, max(least, self.min_tokens))
        counts = top_counts(composites, mean * L)
        return jnp.broadcast_to(counts.T[..., None], (L, B, H))


@dataclass(frozen=True)
class UniformShares(SharedBudget):
    """The same for all heads of all layers, for scores that are known only once all layers have read a prompt."""

    budget: Fixed | Fraction

    def __post_init__(self) -> None:
        check_layers_alike(self)

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        return jnp.broadcast_to(mean[:, None], scores.shape[:3])


@dataclass(frozen=True)
class GlobalShares(SharedBudget):
    """Entries of all layers and heads compete with each other, as in KVzip: a row's best are kept wherever they are.

    On a mesh nothing is communicated: a group of heads lies on one device.

    Attributes:
        budget: entries of the mean kv head.
        groups: how many groups of consecutive kv heads share a total each; the number of devices that kv heads are
            spread over must divide it. 1: all heads compete.
        min_tokens: no head keeps fewer, as far as it has them; out of the same total.
        strict: keep what scores above the last entry that would fit, and not that entry: one less of the total, and
            fewer where several score alike. What is protected stays, and so does all of a prompt that fits.
    """

    budget: Fixed | Fraction
    groups: int = 1
    min_tokens: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        check_integer("min_tokens", self.min_tokens, least=0)
        check_layers_alike(self)

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, M = scores.shape
        groups = self.groups // heads.kv_devices()
        grouped = jnp.moveaxis(scores.reshape(L, B, groups, H // groups, M), 0, 2).reshape(B * groups, -1, M)
        grouped = raise_best(grouped, max(least, self.min_tokens))
        totals = jnp.repeat(mean, groups) * (L * H // groups)
        counts = _above_last(grouped, totals) if self.strict else top_counts(grouped, totals)
        return jnp.moveaxis(counts.reshape(B, groups, L, H // groups), 2, 0).reshape(L, B, H)


def _above_last(scores: Float[Array, "B X M"], totals: Int[Array, "B"]) -> Int[Array, "B X"]:
    """How many of each X's scores are above the `totals`-th largest of a row."""
    ordered = jnp.sort(scores.reshape(scores.shape[0], -1), axis=-1)
    held = jnp.sum(ordered > -jnp.inf, axis=-1)
    place = jnp.clip(ordered.shape[1] - totals, 0, ordered.shape[1] - 1)
    last = jnp.take_along_axis(ordered, place[:, None], axis=-1)
    last = jnp.where(totals >= held, -jnp.inf, last[:, 0])[:, None, None]
    return jnp.sum((scores > last) | jnp.isposinf(scores), axis=-1)


def raise_best(scores: Float[Array, "B X M"], least: int | Int[Array, "B"]) -> Float[Array, "B X M"]:
    """The `least` best of each X, and what equals the last of them, raised above all others."""
    if isinstance(least, int) and least == 0:
        return scores
    count = jnp.broadcast_to(jnp.minimum(least, scores.shape[-1]), scores.shape[:1])[:, None, None]
    last = jnp.take_along_axis(jnp.sort(scores, axis=-1), jnp.minimum(-count, -1) + scores.shape[-1], axis=-1)
    return jnp.where((count > 0) & (scores >= last) & (scores > -jnp.inf), jnp.inf, scores)


def check_layers_alike(shared: SharedBudget) -> None:
    """Raises ValueError unless the total is that of layers which are all alike."""
    if not isinstance(shared.budget, Fixed | Fraction):
        raise ValueError(
            f"{shared.budget} under {type(shared).__name__}: accepted are Fixed and Fraction, which give to all layers "
            "alike"
        )
