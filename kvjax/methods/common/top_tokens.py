"""The selection of the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import top_tokens
from kvjax.policy import Ranked, Select


@dataclass(frozen=True)
class TopTokens(Select):
    """Each head retains its own highest scores; of equal scores the earlier position."""

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "scores"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        return top_tokens(ranked.scores, ranked.positions, ranked.counts, size=ranked.size)

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        """The lowest scores; of equal scores the later position, so that victims are the complement of `keep`."""
        if count == 1:
            return victims_one_by_one(scores, positions, count)
        # A loop inside a step would divide the graph of kernels that a GPU launches at once.
        one_by_one, at_once = (partial(find, count=count) for find in (victims_one_by_one, victims_at_once))
        return jax.lax.platform_dependent(scores, positions, cuda=at_once, default=one_by_one)


def victims_one_by_one(
    scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
) -> Int[Array, "B H count"]:
    """What `TopTokens.victims` returns, in one pass per victim."""
    slots = jnp.arange(scores.shape[-1])

    def next_victim(scores: Array, _: None) -> tuple[Array, Array]:
        lowest = jnp.min(scores, axis=-1, keepdims=True)
        tied = (scores == lowest) & (scores < jnp.inf)
        latest = jnp.max(jnp.where(tied, positions, -1), axis=-1, keepdims=True)
        victim = tied & (positions == latest)
        index = jnp.min(jnp.where(victim, slots, scores.shape[-1]), axis=-1)  # an argmax takes a CPU far longer
        return jnp.where(victim, jnp.inf, scores), index.astype(jnp.int32)

    _, victims = jax.lax.scan(next_victim, scores, length=count)
    return jnp.moveaxis(victims, 0, -1)


def victims_at_once(
    scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
) -> Int[Array, "B H count"]:
    """What `TopTokens.victims` returns, in another order, by the selection of the highest negated scores."""
    last = jnp.iinfo(jnp.int32).max
    index = top_tokens(-scores, last - positions, jnp.full(scores.shape[:2], count), size=count)
    return jnp.where(index < 0, scores.shape[-1], index)
