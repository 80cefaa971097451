"""Budgets that are allocated once all layers have read a prompt: equal shares, and one competition of all heads."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.policy import AllocatedBudget, Layout, check_integer

from .allocation import check_limited, check_mean, raise_best


@dataclass(frozen=True)
class UniformShares(AllocatedBudget):
    """All heads of a layer retain the same number, for scores that are known only once all layers have read a prompt.

    Attributes:
        budget: entries of each kv head.
    """

    def __post_init__(self) -> None:
        check_limited(self.budget)

    @property
    def plain(self) -> bool:
        return self.budget.plain

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        return jnp.broadcast_to(means[..., None], scores.shape[:3])


@dataclass(frozen=True)
class GlobalShares(AllocatedBudget):
    """A row's best entries are retained, whichever layer and head they belong to, as in KVzip.

    On a mesh nothing is communicated, because a group of heads lies on one device.

    Attributes:
        budget: entries of the mean kv head, the same for all layers.
        groups: the number of groups of consecutive kv heads, each of which retains its own total. The number of devices
            that kv heads are divided over must divide it. 1: all heads compete.
        min_tokens: no head retains fewer, as far as it has them; out of the same total.
        strict: retain the entries that score above the last one that would fit, and not that entry: one entry less than
            the total, and fewer where several score alike. Protected entries stay, and so does a prompt that fits.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    groups: int = 1
    min_tokens: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        check_integer("groups", self.groups, least=1)
        check_integer("min_tokens", self.min_tokens, least=0)
        check_mean(self.budget)

    @property
    def plain(self) -> bool:
        return self == GlobalShares(self.budget)

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, M = scores.shape
        groups = self.groups // heads.kv_devices()
        grouped = jnp.moveaxis(scores.reshape(L, B, groups, H // groups, M), 0, 2).reshape(B * groups, -1, M)
        grouped = raise_best(grouped, max(least, self.min_tokens))
        totals = jnp.repeat(jnp.sum(means, axis=0), groups) * (H // groups)
        counts = _above_last(grouped, totals) if self.strict else top_counts(grouped, totals)
        return jnp.moveaxis(counts.reshape(B, groups, L, H // groups), 2, 0).reshape(L, B, H)


def _above_last(scores: Float[Array, "B X M"], totals: Int[Array, "B"]) -> Int[Array, "B X"]:
    """Returns the number of each X's scores that are above the `totals`-th largest of a row."""
    ordered = jnp.sort(scores.reshape(scores.shape[0], -1), axis=-1)
    held = jnp.sum(ordered > -jnp.inf, axis=-1)
    place = jnp.clip(ordered.shape[1] - totals, 0, ordered.shape[1] - 1)
    last = jnp.take_along_axis(ordered, place[:, None], axis=-1)
    last = jnp.where(totals >= held, -jnp.inf, last[:, 0])[:, None, None]
    return jnp.sum((scores > last) | jnp.isposinf(scores), axis=-1)
