"""Segment attention on TPUs (Mosaic): one pass over the tiles of each head's own segment.

Keys and values are fetched by pages, from wherever a segment begins. Positions lie along vector lanes, where a block
begins at a multiple of its size. So two neighbouring blocks are fetched and rolled until those of the tile come first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem
from jaxtyping import Array, Float, Int

from ..mosaic import (
    LANES,
    MOST_QUERY_ROWS,
    MOST_TILE_LOGITS,
    Interpret,
    SoftmaxScratch,
    check,
    compiler_params,
    in_place,
    stored_transposed,
    visible_in_tile,
)
from ..mosaic_codes import (
    QueryRows,
    check_alike,
    clear_outside,
    entry_nbytes,
    merge_heads,
    tile_logits,
    weighted_values,
)
from ..quantized import QuantizedArray
from ..slot_attention.reference import Asked
from .reference import PAGE, SegmentAttention

TILE_BYTES = 128 << 10  # a tile of keys; a tile of values has the same size


def segment_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    start: Int[Array, "B H"],
    used: Int[Array, "B H"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    asked: Asked | None = None,
    interpret: Interpret = False,
) -> SegmentAttention:
    """Computes what the reference defines, but for logits and scores: a segment does not begin where a block does.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32 or bfloat16; for T smaller than a tile; for keys
            and values that are not quantised alike; for unquantised heads whose D does not fill vector lanes; for more
            than MOST_QUERY_ROWS rows per kv head.
    """
    check(q, k, v, quantized=True)
    check_alike(k, v)
    B, Hq, W, D = q.shape
    P, T = k_positions.shape[1:]
    H = start.shape[1]
    J = H // P
    rows = QueryRows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > MOST_QUERY_ROWS:
        raise NotImplementedError(f"{stacked} query rows per kv head: expected at most {MOST_QUERY_ROWS}")
    if stored_transposed(D) and not isinstance(k, QuantizedArray):
        raise NotImplementedError(f"heads of {D} channels: expected a multiple of {LANES}")
    most = min(TILE_BYTES // entry_nbytes(k), MOST_TILE_LOGITS // stacked)
    size = min(max(most // LANES, 1), T // LANES) * LANES
    if size == 0:
        raise NotImplementedError(f"a pool of {T} rows per lane: expected at least {LANES}")

    def paged(x: Any) -> Any:
        """Keys or values by pages. Scales are given twice, for two neighbouring blocks."""
        if isinstance(x, QuantizedArray):
            arrays: Any = {"codes": paged(x.codes), "scales": (merge_heads(x.scales, True),) * 2}
            return replace(x, **arrays)
        return in_place(x.reshape(B * P, T // PAGE, PAGE, x.shape[-1]), interpret)

    per_row = [x for x in (k_positions, bias) if x is not None]  # of the pool
    used = jnp.where(jnp.any(q_positions >= 0, axis=1)[:, None], used, 0).astype(jnp.int32).reshape(-1)
    start = start.astype(jnp.int32).reshape(-1)

    def page(n: Array, j: Array, start: Any, used: Any) -> Array:
        """The first page of tile j. A tile that would end beyond the lane begins earlier.

        After the last tile of a segment it is that tile again, so that nothing is fetched.
        """
        last = jnp.maximum(div(used[n] + size - 1, size) - 1, 0)
        return jnp.minimum(div(start[n], PAGE) + jnp.minimum(j, last) * (size // PAGE), (T - size) // PAGE)

    def block_index(heads: int, next: int, n: Array, j: Array, start: Any, used: Any) -> tuple[Array, int, Array]:
        place = div(page(n, j, start, used) * PAGE, size) + next
        return div(n, heads), 0, jnp.minimum(place, (T - 1) // size)

    def both(lines: int, heads: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        """Two neighbouring blocks of an array [.., lines, T], a row of which serves the given number of heads."""
        first, second = (pl.BlockSpec((None, lines, size), partial(block_index, heads, next)) for next in (0, 1))
        return first, second

    def per_head(*shape: int) -> pl.BlockSpec:
        """All of one head's part of an array [B*H, ...]."""
        return pl.BlockSpec((None, *shape), lambda n, j, *_: (n, *(0,) * len(shape)))

    def entry_specs(x: Any) -> Any:
        """Tiles of keys or values."""
        if isinstance(x, QuantizedArray):
            specs: Any = {"codes": entry_specs(x.codes), "scales": both(x.scales.shape[-1], J)}
            return replace(x, **specs)
        return pl.BlockSpec(
            (None, pl.Element(size // PAGE), pl.Element(PAGE), pl.Element(x.shape[-1])),
            lambda n, j, start, used: (div(n, J), page(n, j, start, used), 0, 0),
        )

    tiles = (jnp.max(used) + size - 1) // size
    context, lse = pl.pallas_call(
        partial(_kernel, size=size, last=T - size, heads=H, lane_heads=J, scale=scale, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * H, jnp.maximum(tiles, 1)),
            in_specs=[
                per_head(*rows.queries.shape[1:]),
                pl.BlockSpec((None, R, 1), lambda n, j, *_: (div(n, H), 0, 0)),
                *map(entry_specs, (k, v)),
                *both(P, H) * len(per_row),
            ],
            out_specs=[per_head(*rows.shape), per_head(R, 1)],
            scratch_shapes=SoftmaxScratch.scratch(rows.shape),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B * H, *rows.shape), q.dtype),
            jax.ShapeDtypeStruct((B * H, R, 1), jnp.float32),
        ],
        compiler_params=compiler_params("parallel", "arbitrary"),
        interpret=interpret,
        name="segment_attention",
    )(start, used, rows.queries, rows.positions, *map(paged, (k, v)), *(x for x in per_row for _ in range(2)))
    return SegmentAttention(rows.unpad(context).reshape(q.shape), rows.unpad(lse).reshape(B, Hq, W))


def _kernel(
    start: Any,
    used: Any,
    q: Any,
    t: Any,
    k: Any,
    v: Any,
    *refs: Any,
    size: int,
    last: int,
    heads: int,
    lane_heads: int,
    scale: float,
    window: int | None,
) -> None:
    """Adds tile j of head n to its softmax, and writes the head's results at the last step.

    Args:
        size: rows of the pool per tile.
        last: the last row of a lane at which a tile can begin.
        heads: H.
        lane_heads: heads per lane.
    """
    *per_row, out, lse = refs[:-3]
    softmax = SoftmaxScratch(*refs[-3:])
    n, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()

    @pl.when(j * size < used[n])
    def _() -> None:
        wanted = start[n] + j * size
        first = jnp.minimum(wanted, last)
        lane = div(rem(n, heads), lane_heads)

        def aligned(here: Array, next: Array) -> Array:
            """The tile's own part of two neighbouring blocks."""
            both = jnp.concatenate([here, next], axis=1)
            return pltpu.roll(both, rem(2 * size - rem(first, size), 2 * size), 1)[:, :size]

        def tile(x: Any) -> Any:
            """The tile's keys or values, [size, D]."""
            if isinstance(x, QuantizedArray):
                return replace(x, codes=tile(x.codes), scales=aligned(*(y[...].astype(jnp.float32) for y in x.scales)))
            return x[...].reshape(size, -1)

        own = [aligned(*(x[pl.ds(lane, 1)] for x in pair)) for pair in zip(per_row[::2], per_row[1::2], strict=True)]
        logits = tile_logits(q[...], tile(k), False) * scale
        if len(own) > 1:
            logits += own[1]
        index = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        begin, end = wanted - first, start[n] + used[n] - first
        occupied = (index >= begin) & (index < end)
        logits = jnp.where(visible_in_tile(t[...], own[0], window, occupied), logits, -jnp.inf)
        softmax.add(logits, partial(weighted_values, clear_outside(tile(v), False, begin, end), False))

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...], lse[...] = context.astype(out.dtype), sums
