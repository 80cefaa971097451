"""Grouped products in plain XLA.

XLA has a kernel for `jax.lax.ragged_dot` on TPUs, which reads each matrix that has rows once. On CPUs and GPUs it
multiplies all rows with all matrices and masks: for g matrices it takes g times the operations, and g times the rows in
memory. A loop over tiles of rows takes its place there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .tiles import tiles_of


def grouped_product(
    rows: Float[Array, "M I"], matrices: Float[Array, "groups I O"], sizes: Int[Array, "groups"]
) -> Float[Array, "M O"]:
    """Computes what the reference defines."""
    return jax.lax.platform_dependent(rows, matrices, sizes, tpu=jax.lax.ragged_dot, default=by_tiles)


def by_tiles(
    rows: Float[Array, "M I"], matrices: Float[Array, "groups I O"], sizes: Int[Array, "groups"]
) -> Float[Array, "M O"]:
    """The same by a loop over the tiles in use.

    The last tile of a matrix may reach into the rows of later ones, which overwrite them.
    """
    M = len(rows)
    tiles = tiles_of(sizes, M, rows_per_tile := _rows_per_tile(M, len(sizes)))
    padded = jnp.pad(rows, ((0, rows_per_tile), (0, 0)))

    def multiply(i: Int[Array, ""], out: Float[Array, "M+tile O"]) -> Float[Array, "M+tile O"]:
        part = jax.lax.dynamic_slice_in_dim(padded, tiles.first[i], rows_per_tile)
        matrix = jax.lax.dynamic_index_in_dim(matrices, tiles.group[i], keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(out, part @ matrix, tiles.first[i], axis=0)

    out = jnp.zeros((len(padded), matrices.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, tiles.used, multiply, out)[:M]


def _rows_per_tile(rows: int, groups: int) -> int:
    """The power of two, up to 64, next below the mean number of rows of a group."""
    return 1 << min(max(rows // groups, 1).bit_length() - 1, 6)
