"""Overwrites of one entry per kv head in plain XLA: scatters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

SINGLY = 16


def set_slots(
    x: Shaped[Array, "B P S *D"], at: tuple[Array | np.ndarray, ...], new: Shaped[Array, "B H *D"] | int
) -> Shaped[Array, "B P S *D"]:
    """Writes `new` to these slots. Slots beyond the last one are dropped.

    A slot with few numbers, such as scales, is written number by number. XLA would otherwise lay these numbers out
    along a TPU's vector lanes without filling them: 8 numbers per slot would take the memory and the time of 128.
    """
    index = at
    if x.ndim == 4 and x.shape[3] <= SINGLY:
        index = *(i[..., None] for i in at), jnp.arange(x.shape[3])
    return x.at[index].set(new, mode="drop", unique_indices=True)


def write_rows(stored: Any, row: Int[Array, "B H"], new: Any) -> Any:
    """Overwrites one row of each kv head's lane.

    Args:
        stored: a pytree of arrays [B, P, T, C]. A lane has the rows of H / P consecutive kv heads.
        row: in the lane of each head. A row of T or more is dropped.
        new: a pytree of the same structure, of arrays [B, H, C].
    """
    B, H = row.shape

    def put(x: Array, y: Array) -> Array:
        # NumPy's indices are constants; a floored quotient of JAX's is 18 operations for XLA, in every layer.
        return set_slots(x, (np.arange(B)[:, None], np.arange(H) // (H // x.shape[1]), row), y)

    return jax.tree.map(put, stored, new)
