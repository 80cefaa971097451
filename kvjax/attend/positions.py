"""The positions of tokens that come to a cache."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def positions_behind(length: Int[Array, "B"], lengths: Int[Array, "B"], size: int) -> Int[Array, "B N"]:
    """The positions of up to N tokens per row, right-aligned, that follow the tokens of a cache; -1 for padding.

    Args:
        length: the number of tokens that each row of the cache has had.
        lengths: the number of tokens that come to each row.
        size: N.
    """
    behind = jnp.arange(size - 1, -1, -1)
    end = length + lengths
    return jnp.where(behind < lengths[:, None], end[:, None] - 1 - behind, -1)
