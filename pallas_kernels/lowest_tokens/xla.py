"""The lowest scores in plain XLA: one pass for each, because a few are wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lowest_tokens(
    scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], *, count: int
) -> Int[Array, "B H count"]:
    """Computes what the reference defines."""
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    slots = jnp.arange(scores.shape[-1])

    def following(scores: Array, _: None) -> tuple[Array, Array]:
        lowest = jnp.min(scores, axis=-1, keepdims=True)
        tied = (scores == lowest) & (scores < jnp.inf)
        latest = jnp.max(jnp.where(tied, positions, -1), axis=-1, keepdims=True)
        found = tied & (positions == latest)
        index = jnp.min(jnp.where(found, slots, scores.shape[-1]), axis=-1)  # an argmax takes a CPU far longer
        return jnp.where(found, jnp.inf, scores), index.astype(jnp.int32)

    return jnp.moveaxis(jax.lax.scan(following, scores, length=count)[1], 0, -1)
