"""The definition of `lowest_tokens`: a stable sort."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lowest_tokens(
    scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], *, count: int
) -> Int[Array, "B H count"]:
    """Finds the `count` lowest scores of each head below inf; of equal scores, those of later positions.

    They are the complement of what `top_tokens` chooses: NaN counts as -inf.

    Returns:
        Indices in any order. Where a head has fewer such scores, S takes their place.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    ranked = jnp.lexsort((-positions, scores), axis=-1)[..., :count]
    finite = jnp.take_along_axis(scores, ranked, axis=-1) < jnp.inf
    return jnp.where(finite, ranked, scores.shape[-1]).astype(jnp.int32)
