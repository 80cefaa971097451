"""Grouped products on GPUs (Triton): a program multiplies a tile of rows with some columns of their matrix.

A tile has rows of one group only, and the program reads the matrix of that group from where it is. Programs of tiles
without rows end at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from ..triton.blocks import power_of_two
from ..triton.common import check_device, product
from .tiles import tiles_of

INNER = 64  # inputs that are multiplied at a time
OFFSETS = 2**31  # beyond it, the offset of a matrix does not fit into 32 bits


def grouped_product(
    rows: Float[Array, "M I"],
    matrices: Float[Array, "groups I O"],
    sizes: Int[Array, "groups"],
    *,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for 2^31 numbers or more in
            rows or matrices; for a GPU that is not NVIDIA's or older than the A100.
    """
    check_device()
    kinds = {jnp.dtype(x.dtype).name for x in (rows, matrices)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16", "float16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}: expected one of float32, bfloat16 and float16")
    if max(rows.size, matrices.size, len(rows) * matrices.shape[-1]) >= OFFSETS:
        raise NotImplementedError(f"{matrices.size:,} numbers in all matrices: expected less than {OFFSETS:,}")
    M, (groups, _, outputs) = len(rows), matrices.shape
    wide = rows.dtype == jnp.float32
    tile = min(power_of_two(-(-M // groups), 16), 32 if wide else 128)
    columns = 32 if wide else 64
    tiles = tiles_of(sizes, M, tile)
    return pl.pallas_call(
        partial(grouped_product_kernel, tile=tile, columns=columns),
        grid=(pl.cdiv(outputs, columns), len(tiles.group)),
        out_shape=jax.ShapeDtypeStruct((M, outputs), rows.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8 if tile == 128 else 4, num_stages=3),
        interpret=interpret,
    )(rows, matrices, tiles.group, tiles.first, tiles.end)


def grouped_product_kernel(
    rows_ref: Any,
    matrices_ref: Any,
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    out_ref: Any,
    *,
    tile: int,
    columns: int,
) -> None:
    """One tile of rows, and `columns` columns of the product."""
    own = pl.program_id(1)
    inputs, outputs = rows_ref.shape[1], out_ref.shape[1]
    group, first, end = group_ref[own], first_ref[own], end_ref[own]
    column = pl.program_id(0) * columns
    row_there = first + jnp.arange(tile) < end
    column_there = column + jnp.arange(columns) < outputs

    @pl.when(first < end)
    def _() -> None:
        def add(i: Int[Array, ""], total: Float[Array, "tile columns"]) -> Float[Array, "tile columns"]:
            start = i * INNER
            there = start + jnp.arange(INNER) < inputs
            x = plgpu.load(
                rows_ref.at[pl.ds(first, tile), pl.ds(start, INNER)],
                mask=row_there[:, None] & there[None],
                other=0.0,
            )
            w = plgpu.load(
                matrices_ref.at[group, pl.ds(start, INNER), pl.ds(column, columns)],
                mask=there[:, None] & column_there[None],
                other=0.0,
            )
            return total + product(x, w)

        total = jax.lax.fori_loop(0, pl.cdiv(inputs, INNER), add, jnp.zeros((tile, columns), jnp.float32))
        plgpu.store(
            out_ref.at[pl.ds(first, tile), pl.ds(column, columns)],
            total.astype(out_ref.dtype),
            mask=row_there[:, None] & column_there[None],
        )
