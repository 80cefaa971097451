"""Attention of many queries on a TPU over entries in any order: each query sees what its position lets it see.

A step takes a block of the queries of all heads that share a kv head, and a tile of its keys and values. Tiles before
the first and after the last that some query of a block sees are neither fetched nor computed.
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

from ..mosaic import LANES, Interpret, Softmax, as_column, in_place, lies_turned, params, product, seen, tile_size
from ..mosaic_codes import cleared, slots_last, weighed
from ..tiling import pad
from ..visibility import ends, sees

ROWS = 1024  # of queries a kv head to a block, of all heads that share it
KEYS = 512  # to a tile, at most


def by_position(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B H M"] | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """As `reference.prompt_attention`, but that the queries' own entries may lie anywhere."""
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    rows = max(ROWS // G // LANES, 1) * LANES
    size, blocks = tile_size(M, KEYS), -(-N // rows)
    q = pad(q, -N % rows, axis=2).reshape(B * H, G, blocks * rows, D)
    t = pad(q_positions.astype(jnp.int32), -N % rows, axis=1, value=-1)
    span = ends(jnp.swapaxes(sees(t, k_positions, rows=rows, keys=size, window=window), 2, 3))
    first, last = span[..., 0].reshape(-1), span[..., 1].reshape(-1)
    turned = lies_turned(D)
    entries = [in_place(slots_last(x, turned), interpret) for x in (k, v)]
    lanes = [x.reshape(B * H, 1, M) for x in (k_positions.astype(jnp.int32), bias) if x is not None]

    def tile(n: Array, i: Array, j: Array, first: Any, last: Any) -> Array:
        """The one to fetch: after the last none, which is said by asking for that again."""
        at = n * blocks + i
        return jnp.minimum(first[at] + j, jnp.maximum(last[at] - 1, 0))

    def of_queries(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, G, rows, channels), lambda n, i, j, *_: (n, 0, i, 0))

    along = pl.BlockSpec((None, 1, size), lambda n, i, j, *span: (n, 0, tile(n, i, j, *span)))
    flat = pl.BlockSpec((None, D, size), along.index_map)
    down = pl.BlockSpec((None, size, D), lambda n, i, j, *span: (n, tile(n, i, j, *span), 0))
    out, lse = pl.pallas_call(
        partial(_kernel, blocks=blocks, size=size, entries=M, scale=scale, window=window, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * H, blocks, jnp.maximum(jnp.max(last - first), 1)),
            in_specs=[
                of_queries(D),
                pl.BlockSpec((None, 1, rows), lambda n, i, j, *_: (div(n, H), 0, i)),
                *[flat if turned else down] * 2,
                *[along] * len(lanes),
            ],
            out_specs=[of_queries(D), pl.BlockSpec((None, None, 1, G * rows), lambda n, i, j, *_: (n, i, 0, 0))],
            scratch_shapes=[pltpu.VMEM((G * rows, 1), jnp.int32), *Softmax.scratch((G * rows, D))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B * H, blocks, 1, G * rows), jnp.float32),
        ],
        compiler_params=params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="prompt_attention",
    )(first, last, q, t[:, None], *entries, *lanes)
    lse = jnp.swapaxes(lse.reshape(B * H, blocks, G, rows), 1, 2)
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
    blocks: int,
    size: int,
    entries: int,
    scale: float,
    window: int | None,
    turned: bool,
) -> None:
    *bias, out, lse, positions = refs[:-3]
    softmax = Softmax(*refs[-3:])
    n, i, j = (pl.program_id(axis) for axis in range(3))
    at = n * blocks + i
    place = first[at] + j

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()
        positions[...] = jnp.concatenate([as_column(t[...])] * q.shape[0])

    @pl.when(place < last[at])
    def _() -> None:
        keys, values, held = k[...], v[...], None
        if entries % size:  # what a tile has beyond the last entry is not even a number
            held = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < entries - place * size
            values = cleared(values, turned, 0, entries - place * size)
        logits = product(q[...].reshape(-1, q.shape[-1]), keys, (1, 0 if turned else 1)) * scale
        if bias:
            logits += bias[0][...]
        logits = jnp.where(seen(positions[...], p[...], window, held), logits, -jnp.inf)
        softmax.add(logits, partial(weighed, values, turned))

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...] = context.reshape(out.shape).astype(out.dtype)
        lse[...] = jnp.broadcast_to(sums, (sums.shape[0], LANES)).T[:1]
