"""The pages of a pool, at which segments begin."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

PAGE = 16
"""The number of rows of a pool in a page; segments begin at multiples of it."""


def pages(x: Array, lane: Int[Array, "... #n"], page: Int[Array, "... n"]) -> Array:
    """Gathers pages of a pool.

    Args:
        x: an array with axes [B, P, T, ...].
        lane: the lane of each page.
        page: the number of each page in its lane. A number beyond the last page gives the last.

    Returns:
        An array with axes [B, ..., n, PAGE, ...].
    """
    B, P, T = x.shape[:3]
    row = jnp.arange(B).reshape(B, *(1,) * (page.ndim - 1))
    return jnp.asarray(x).reshape(B, P, T // PAGE, PAGE, *x.shape[3:]).at[row, lane, page].get(mode="clip")
