"""The lowest scores on GPUs: the highest negated ones. A loop inside a step would divide the step's CUDA graph."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..dispatch import DeclinedError
from ..top_tokens.triton import top_tokens


def lowest_tokens(
    scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], *, count: int, interpret: bool = False
) -> Int[Array, "B H count"]:
    """Computes what the reference defines.

    Raises:
        DeclinedError: for one score, which needs no loop.
        NotImplementedError: on a GPU that the kernels do not serve.
    """
    if count == 1:
        raise DeclinedError
    counts = jnp.full(scores.shape[:2], count)
    last = jnp.iinfo(jnp.int32).max
    negated = jnp.where(jnp.isnan(scores), jnp.inf, -scores)
    index = top_tokens(negated, last - positions, counts, size=count, interpret=interpret)
    return jnp.where(index < 0, scores.shape[-1], index)
