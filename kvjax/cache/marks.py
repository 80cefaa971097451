"""Marks of entries, by their indices."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def mark(index: Int[Array, "B H K"], size: int) -> Bool[Array, "B H size"]:
    """True at the given indices; an index outside of 0 .. size - 1 is dropped."""
    if index.shape[2] == 1:  # a comparison, which other passes include
        return jnp.arange(size) == index
    b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
    unmarked = jnp.zeros((*index.shape[:2], size), bool)
    return unmarked.at[b, h, jnp.where(index < 0, size, index)].set(True, mode="drop")
