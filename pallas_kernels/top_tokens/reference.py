"""The definition of `top_tokens`: a stable sort."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def top_tokens(
    scores: Float[Array, "B H M"],
    positions: Int[Array, "B H M"],
    counts: Int[Array, "B H"],
    *,
    size: int,
) -> Int[Array, "B H size"]:
    """Finds the largest scores of each head.

    Args:
        scores: float32. -inf and NaN are never chosen, so a head may yield fewer entries than its count.
        positions: token positions. Those of entries with scores above -inf differ. Of equal scores, the one with the
            smaller position is chosen.
        counts: the number of entries to choose, at most `size`.
        size: the length of the result.

    Returns:
        Indices of the chosen entries, ascending, followed by -1.
    """
    ranked = jnp.lexsort((positions, -scores), axis=-1)[..., :size]
    number = jnp.minimum(counts, jnp.sum(scores > -jnp.inf, axis=-1))
    last = scores.shape[-1]
    chosen = jnp.sort(jnp.where(jnp.arange(ranked.shape[-1]) < number[..., None], ranked, last), axis=-1)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, size - chosen.shape[-1])), constant_values=last)
    return jnp.where(chosen < last, chosen, -1).astype(jnp.int32)
