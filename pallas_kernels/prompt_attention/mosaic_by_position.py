"""Prompt attention on TPUs (Mosaic) over entries in any order: positions decide what each query sees.

A step of the grid takes a block of the queries of one kv head, of all query heads that share it, and a tile of keys and
values. Where the shortest block of so many query heads is too large, some of the heads make a block. Tiles before the
first and after the last that some query of the block sees are not fetched and not computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..mosaic_tpu.codes import clear_outside, merge_heads, weighted_values
from ..mosaic_tpu.common import (
    LANES,
    SMEM_BYTES,
    Interpret,
    SoftmaxScratch,
    as_column,
    compiler_params,
    in_place,
    product,
    round_up,
    stored_transposed,
    tile_size,
    visible_in_tile,
)
from ..softmax import capped
from ..visibility import span, visible_tiles

# Larger steps start less often: 0.35 µs each, beside 2.3 µs of products on a v6e.
BLOCK_ROWS = 2048  # query rows of a kv head per block, at most
BLOCK_BYTES = 512 << 10  # of these rows, at most
MOST_TILE_KEYS = 1024  # keys per tile


def by_position(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Computes what `reference.prompt_attention` defines. The queries' own entries may lie anywhere among the M.

    Raises:
        NotImplementedError: for more blocks of queries than fit into scalar memory.
    """
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    most = max(min(BLOCK_ROWS, BLOCK_BYTES // (D * q.dtype.itemsize)), LANES)
    shares = next(n for n in range(1, Hq // H + 1) if Hq // H % n == 0 and Hq // H // n * LANES <= most)
    G = Hq // H // shares  # query heads per block
    rows = min(most // G // LANES * LANES, round_up(N, LANES))
    size, query_blocks = tile_size(M, MOST_TILE_KEYS), -(-N // rows)
    if 2 * 4 * B * H * query_blocks > SMEM_BYTES:
        blocks = f"{B * H * query_blocks:,} blocks of {rows} queries"
        raise NotImplementedError(f"{blocks}: expected at most {SMEM_BYTES // 8:,}, for the scalar memory")
    q = pad(q, -N % rows, axis=2).reshape(B * H * shares, G, query_blocks * rows, D)
    t = pad(q_positions.astype(jnp.int32), -N % rows, axis=1, value=-1)
    spans = span(jnp.swapaxes(visible_tiles(t, k_positions, rows=rows, keys=size, window=window), 2, 3))
    first, last = spans[..., 0].reshape(-1), spans[..., 1].reshape(-1)
    transposed = stored_transposed(D)
    entries = [in_place(merge_heads(x, transposed), interpret) for x in (k, v)]
    per_entry = [x.reshape(B * H, 1, M) for x in (k_positions.astype(jnp.int32), bias) if x is not None]

    def tile(n: Array, i: Array, j: Array, first: Any, last: Any) -> Array:
        """The tile of step j. After the last visible tile it is that tile again, so that nothing is fetched."""
        at = div(n, shares) * query_blocks + i
        return jnp.minimum(first[at] + j, jnp.maximum(last[at] - 1, 0))

    def of_queries(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, G, rows, channels), lambda n, i, j, *_: (n, 0, i, 0))

    line = pl.BlockSpec((None, 1, size), lambda n, i, j, *spans: (div(n, shares), 0, tile(n, i, j, *spans)))
    entries_last = pl.BlockSpec((None, D, size), line.index_map)
    channels_last = pl.BlockSpec((None, size, D), lambda n, i, j, *spans: (div(n, shares), tile(n, i, j, *spans), 0))
    out, lse = pl.pallas_call(
        partial(
            _kernel,
            shares=shares,
            query_blocks=query_blocks,
            size=size,
            entries=M,
            scale=scale,
            window=window,
            softcap=softcap,
            transposed=transposed,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * H * shares, query_blocks, jnp.maximum(jnp.max(last - first), 1)),
            in_specs=[
                of_queries(D),
                pl.BlockSpec((None, 1, rows), lambda n, i, j, *_: (div(n, H * shares), 0, i)),
                *[entries_last if transposed else channels_last] * 2,
                *[line] * len(per_entry),
            ],
            out_specs=[of_queries(D), pl.BlockSpec((None, None, 1, G * rows), lambda n, i, j, *_: (n, i, 0, 0))],
            scratch_shapes=[pltpu.VMEM((G * rows, 1), jnp.int32), *SoftmaxScratch.scratch((G * rows, D))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B * H * shares, query_blocks, 1, G * rows), jnp.float32),
        ],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="prompt_attention",
    )(first, last, q, t[:, None], *entries, *per_entry)
    lse = jnp.swapaxes(lse.reshape(-1, query_blocks, G, rows), 1, 2)
    return out.reshape(B, Hq, -1, D)[:, :, :N], lse.reshape(B, Hq, -1)[:, :, :N]


def _kernel(
    first: Any,
    last: Any,
    q: Any,
    t: Any,
    k: Any,
    v: Any,
    p: Any,
    *refs: Any,
    shares: int,
    query_blocks: int,
    size: int,
    entries: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    transposed: bool,
) -> None:
    """Adds a tile to the softmax of block i of some query heads n, and writes the block's results at the last step.

    Args:
        shares: blocks side by side that have the query heads of one kv head.
        size: entries per tile.
        entries: M.
    """
    *bias, out, lse, positions = refs[:-3]
    softmax = SoftmaxScratch(*refs[-3:])
    n, i, j = (pl.program_id(axis) for axis in range(3))
    at = div(n, shares) * query_blocks + i
    place = first[at] + j

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()
        positions[...] = jnp.concatenate([as_column(t[...])] * q.shape[0])

    @pl.when(place < last[at])
    def _() -> None:
        keys, values, exists = k[...], v[...], None
        if entries % size:  # beyond the last entry a tile is undefined and may be NaN
            exists = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < entries - place * size
            values = clear_outside(values, transposed, 0, entries - place * size)
        logits = capped(product(q[...].reshape(-1, q.shape[-1]), keys, (1, 0 if transposed else 1)) * scale, softcap)
        if bias:
            logits += bias[0][...]
        logits = jnp.where(visible_in_tile(positions[...], p[...], window, exists), logits, -jnp.inf)
        softmax.add(logits, partial(weighted_values, values, transposed))

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...] = context.reshape(out.shape).astype(out.dtype)
        lse[...] = jnp.broadcast_to(sums, (sums.shape[0], LANES)).T[:1]
