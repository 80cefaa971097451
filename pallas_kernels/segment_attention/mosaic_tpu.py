"""Segment attention on a TPU: one pass over the tiles of each head's own segment, wherever its pages begin.

Keys and values are fetched by pages. Positions lie along the lanes of registers, where a tile can begin at multiples of
its size only: two neighbouring ones are fetched, and turned until the segment's come first.
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

from ..mosaic import LANES, Interpret, Softmax, check, in_place, lies_turned, params, seen
from ..mosaic_codes import Rows, alike, cleared, logits_of, nbytes_of, slots_last, weighed
from ..quantized import QuantizedArray
from .reference import PAGE

TILE_BYTES = 128 << 10  # of keys, and of values
ROWS = 2048  # of queries a kv head, at most


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
    interpret: Interpret = False,
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
    """As `reference.segment_attention`, which says what it computes.

    Raises NotImplementedError for float16, pools of less than the smallest tile or in which keys and values are not
    quantised alike, heads whose channels, or the bytes of their codes, do not fill the lanes of a register, and more
    query rows than fit.
    """
    check(q, k, v, quantized=True)
    alike(k, v)
    B, Hq, W, D = q.shape
    P, T = k_positions.shape[1:]
    H = start.shape[1]
    J = H // P
    rows = Rows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > ROWS:
        raise NotImplementedError(f"{stacked} query rows a kv head; at most {ROWS} are taken")
    if lies_turned(D) and not isinstance(k, QuantizedArray):
        raise NotImplementedError(f"head_dim {D}; a multiple of {LANES} is taken")
    most = min(TILE_BYTES // nbytes_of(k), (1 << 19) // stacked)
    size = min(max(most // LANES, 1), T // LANES) * LANES
    if size == 0:
        raise NotImplementedError(f"a pool of {T} rows; at least {LANES} are taken")

    def paged(x: Any) -> Any:
        if isinstance(x, QuantizedArray):
            arrays: Any = {"codes": paged(x.codes), "scales": (slots_last(x.scales, True),) * 2}
            return replace(x, **arrays)
        return in_place(x.reshape(B * P, T // PAGE, PAGE, x.shape[-1]), interpret)

    lanes = [x for x in (k_positions, bias) if x is not None]
    used = jnp.where(jnp.any(q_positions >= 0, axis=1)[:, None], used, 0).astype(jnp.int32).reshape(-1)
    start = start.astype(jnp.int32).reshape(-1)

    def page(n: Array, j: Array, start: Any, used: Any) -> Array:
        """Where a tile begins. One that would end beyond the pool begins earlier; after a segment none is fetched."""
        last = jnp.maximum(div(used[n] + size - 1, size) - 1, 0)
        return jnp.minimum(div(start[n], PAGE) + jnp.minimum(j, last) * (size // PAGE), (T - size) // PAGE)

    def along(heads: int, next: int, n: Array, j: Array, start: Any, used: Any) -> tuple[Array, int, Array]:
        place = div(page(n, j, start, used) * PAGE, size) + next
        return div(n, heads), 0, jnp.minimum(place, (T - 1) // size)

    def both(lines: int, heads: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        """Neighbouring tiles of an array of which so many heads share a row."""
        first, second = (pl.BlockSpec((None, lines, size), partial(along, heads, next)) for next in (0, 1))
        return first, second

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda n, j, *_: (n, *(0,) * len(shape)))

    def blocks(x: Any) -> Any:
        if isinstance(x, QuantizedArray):
            specs: Any = {"codes": blocks(x.codes), "scales": both(x.scales.shape[-1], J)}
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
                whole(*rows.queries.shape[1:]),
                pl.BlockSpec((None, R, 1), lambda n, j, *_: (div(n, H), 0, 0)),
                *map(blocks, (k, v)),
                *both(P, H) * len(lanes),
            ],
            out_specs=[whole(*rows.shape), whole(R, 1)],
            scratch_shapes=Softmax.scratch(rows.shape),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B * H, *rows.shape), q.dtype),
            jax.ShapeDtypeStruct((B * H, R, 1), jnp.float32),
        ],
        compiler_params=params("parallel", "arbitrary"),
        interpret=interpret,
        name="segment_attention",
    )(start, used, rows.queries, rows.positions, *map(paged, (k, v)), *(x for x in lanes for _ in range(2)))
    return rows.context(context).reshape(q.shape), rows.context(lse).reshape(B, Hq, W)


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
    *lanes, out, lse = refs[:-3]
    softmax = Softmax(*refs[-3:])
    n, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()

    @pl.when(j * size < used[n])
    def _() -> None:
        wanted = start[n] + j * size
        first = jnp.minimum(wanted, last)
        lane = div(rem(n, heads), lane_heads)

        def turned(here: Array, next: Array) -> Array:
            """The tile's own of two neighbouring tiles."""
            both = jnp.concatenate([here, next], axis=1)
            return pltpu.roll(both, rem(2 * size - rem(first, size), 2 * size), 1)[:, :size]

        def tile(x: Any) -> Any:
            if isinstance(x, QuantizedArray):
                return replace(x, codes=tile(x.codes), scales=turned(*(y[...].astype(jnp.float32) for y in x.scales)))
            return x[...].reshape(size, -1)

        own = [turned(*(x[pl.ds(lane, 1)] for x in pair)) for pair in zip(lanes[::2], lanes[1::2], strict=True)]
        logits = logits_of(q[...], tile(k), False) * scale
        if len(own) > 1:
            logits += own[1]
        index = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        begin, end = wanted - first, start[n] + used[n] - first
        held = (index >= begin) & (index < end)
        logits = jnp.where(seen(t[...], own[0], window, held), logits, -jnp.inf)
        softmax.add(logits, partial(weighed, cleared(tile(v), False, begin, end), False))

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...], lse[...] = context.astype(out.dtype), sums
