"""Window scores on TPUs (Mosaic): tiles of weights are summed along the queries and never leave the chip.

If the log-sum-exp of the queries is not given, a kernel of its own computes it in a pass over the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..mosaic_tpu.common import (
    LANES,
    SMEM_BYTES,
    SUBLANES,
    VMEM_BYTES,
    Interpret,
    as_column,
    check,
    compiler_params,
    in_place,
    product,
    round_up,
    stored_transposed,
    tile_size,
    visible_in_tile,
)
from ..softmax import capped, finite_or_zero
from .reduction import DEFAULT_REDUCTION, Reduction

BLOCK_Q = 256  # query rows of a head per tile
MOST_HEAD_LOGITS = 1 << 17  # logits of a tile and query head
TILE_BYTES = 512 << 10  # a tile of keys


def window_scores(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    lse: Float[Array, "B Hq W"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    causal: bool = True,
    reduction: Reduction = DEFAULT_REDUCTION,
    interpret: Interpret = False,
) -> Float[Array, "B H M"]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32 or bfloat16; for more tiles of keys than scalar
            memory holds bounds for; for a tile of queries of which two fill three quarters of the chip's memory.
    """
    check(q, k)
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    rows = min(BLOCK_Q, round_up(W, 2 * SUBLANES if W <= LANES else LANES))
    padded_rows = max(rows, LANES)  # positions and log-sum-exps of a tile's queries fill vector lanes
    keys = tile_size(M, keys_per_tile(D, k.dtype.itemsize, rows))
    query_blocks, key_blocks = -(-W // rows), -(-M // keys)
    most = SMEM_BYTES // (8 * B * H) - 1
    if key_blocks > most:
        raise NotImplementedError(f"{key_blocks} tiles of keys for each of {B * H} heads: expected at most {most}")
    nbytes = G * rows * round_up(D, LANES) * q.dtype.itemsize
    if nbytes > VMEM_BYTES * 3 // 8:
        raise NotImplementedError(f"{nbytes:,} bytes of queries per tile: expected at most {VMEM_BYTES * 3 // 8:,}")
    q = pad(q.reshape(B * H, G, W, D), -W % rows, axis=2)
    t = pad(q_positions.astype(jnp.int32), query_blocks * padded_rows - W, axis=1, value=-1)
    p = k_positions.astype(jnp.int32).reshape(B * H, 1, M)
    biases = [] if bias is None else [bias.reshape(B * H, 1, M)]
    transposed = stored_transposed(D)
    entries = jnp.swapaxes(k, 2, 3).reshape(B * H, D, M) if transposed else k.reshape(B * H, M, D)
    entries = in_place(entries, interpret)
    sizes = Sizes(rows, padded_rows, keys, M, H, transposed, scale, window, softcap, bias is not None)
    if lse is None:
        lse = _log_sum_exp(sizes, q, t[:, None], entries, p, biases, interpret)
    else:
        lse = pad(lse.reshape(B * H, G, W), query_blocks * padded_rows - W, axis=2)
    # Padding, and queries that see nothing, give no weight.
    lse = jnp.where((jnp.repeat(t, H, axis=0)[:, None] < 0) | (lse == -jnp.inf), jnp.inf, lse)
    lse = pad(lse, -G % SUBLANES, axis=1, value=jnp.inf)
    bounds = _bounds(t.reshape(B, query_blocks, padded_rows), p.reshape(B, H, M), keys, window)

    def query_block(n: Array, j: Array, i: Array, first: Any, last: Any, *_: Any) -> Array:
        """The block of queries of step i, or the nearest that sees tile j of keys."""
        at = n * key_blocks + j
        return jnp.clip(i, jnp.minimum(first[at], query_blocks - 1), jnp.maximum(last[at], 0))

    def key_tile(n: Array, j: Array, lowest: Any, highest: Any) -> Array:
        """Tile j of keys, or the nearest that some query sees."""
        return jnp.clip(j, lowest[n], highest[n])

    line = pl.BlockSpec((None, 1, keys), lambda n, j, i, first, last, low, high: (n, 0, key_tile(n, j, low, high)))
    keys_last = pl.BlockSpec((None, D, keys), line.index_map)
    channels_last = pl.BlockSpec(
        (None, keys, D), lambda n, j, i, first, last, low, high: (n, key_tile(n, j, low, high), 0)
    )
    separate_heads = G if not reduction.commutes and reduction.first == "rows" else 1
    scores = pl.pallas_call(
        partial(_kernel, sizes, reduction, causal or window is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B * H, key_blocks, query_blocks),
            in_specs=[
                pl.BlockSpec((None, G, rows, D), lambda n, j, i, *at: (n, 0, query_block(n, j, i, *at), 0)),
                pl.BlockSpec(
                    (None, 1, padded_rows), lambda n, j, i, *at: (jax.lax.div(n, H), 0, query_block(n, j, i, *at))
                ),
                pl.BlockSpec((None, lse.shape[1], padded_rows), lambda n, j, i, *at: (n, 0, query_block(n, j, i, *at))),
                keys_last if transposed else channels_last,
                line,
                *(line for _ in biases),
            ],
            out_specs=pl.BlockSpec((None, 1, keys), lambda n, j, i, *_: (n, 0, j)),
            scratch_shapes=[pltpu.VMEM((separate_heads, keys), jnp.float32), pltpu.VMEM((1, keys), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B * H, 1, M), jnp.float32),
        compiler_params=compiler_params("parallel", "arbitrary", "arbitrary"),
        interpret=interpret,
        name="window_scores",
    )(*bounds, q, t[:, None], lse, entries, p, *biases)
    return scores.reshape(B, H, M)


@dataclass(frozen=True)
class Sizes:
    """Sizes of tiles, and what is the same for all tiles.

    Attributes:
        rows: queries of a head per tile.
        padded_rows: `rows`, padded to full vector lanes.
        keys: keys per tile.
        M: keys per head.
        heads: H.
        transposed: whether keys are given as [D, M].
    """

    rows: int
    padded_rows: int
    keys: int
    M: int
    heads: int
    transposed: bool
    scale: float
    window: int | None
    softcap: float | None
    biased: bool

    @property
    def key_blocks(self) -> int:
        return -(-self.M // self.keys)


def keys_per_tile(head_dim: int, itemsize: int, rows: int) -> int:
    """Keys per tile, so that a fetch takes longer than the start of a step and a head's logits stay small."""
    most = min(TILE_BYTES // (head_dim * itemsize), MOST_HEAD_LOGITS // rows)
    return max(most // LANES, 1) * LANES


def _bounds(
    t: Int[Array, "B query_blocks rows"], p: Int[Array, "B H M"], keys: int, window: int | None
) -> tuple[Int[Array, "B*H*tiles"], Int[Array, "B*H*tiles"], Int[Array, "B*H"], Int[Array, "B*H"]]:
    """The first and last block of queries that sees each tile of keys, and each head's first and last tile seen."""
    B, H, M = p.shape
    query_blocks = t.shape[1]
    far = jnp.iinfo(jnp.int32).max
    p = pad(p, -M % keys, axis=2, value=-1).reshape(B, H, -1, 1, keys)
    oldest, newest = jnp.min(jnp.where(p < 0, far, p), axis=-1), jnp.max(p, axis=-1)
    see = jnp.max(t, axis=-1)[:, None, None] >= oldest
    if window is not None:
        see &= (newest >= 0) & (jnp.min(jnp.where(t < 0, far, t), axis=-1)[:, None, None] - newest < window)
    first = jnp.where(jnp.any(see, axis=-1), jnp.argmax(see, axis=-1), query_blocks)
    last = jnp.where(jnp.any(see, axis=-1), query_blocks - 1 - jnp.argmax(see[..., ::-1], axis=-1), -1)
    some = first < query_blocks
    lowest = jnp.argmax(some, axis=-1)
    highest = jnp.where(jnp.any(some, axis=-1), some.shape[-1] - 1 - jnp.argmax(some[..., ::-1], axis=-1), lowest)
    first, last, lowest, highest = (x.astype(jnp.int32).reshape(-1) for x in (first, last, lowest, highest))
    return first, last, lowest, highest


def _kernel(
    sizes: Sizes,
    reduction: Reduction,
    pairwise: bool,
    first: Any,
    last: Any,
    lowest: Any,
    highest: Any,
    q: Any,
    t: Any,
    lse: Any,
    k: Any,
    p: Any,
    *refs: Any,
) -> None:
    """Adds the weights of query block i on tile j of keys, and writes the tile's scores at the last block."""
    bias, refs = (refs[0], refs[1:]) if sizes.biased else (None, refs)
    out, score, viewers = refs
    group = q.shape[0]
    n, j, i = (pl.program_id(axis) for axis in range(3))
    at = n * sizes.key_blocks + j
    over_rows = jnp.max if reduction.rows == "max" else jnp.sum

    def add(row: int, weights: Float[Array, "R K"]) -> None:
        """Reduces weights over the queries of the tile, and joins them with those of earlier blocks of queries."""
        new, old = over_rows(weights, axis=0, keepdims=True), score[row : row + 1]
        score[row : row + 1] = jnp.maximum(old, new) if reduction.rows == "max" else old + new

    @pl.when(i == 0)
    def _() -> None:
        score[...] = jnp.zeros(score.shape, jnp.float32)
        viewers[...] = jnp.zeros(viewers.shape, jnp.float32)

    @pl.when((i >= first[at]) & (i <= last[at]))
    def _() -> None:
        column = as_column(t[...])[: sizes.rows]
        sums = lse[...].T[: sizes.rows]
        see = visible_in_tile(column, p[...], sizes.window) if pairwise else (p[...] >= 0) & (column >= 0)
        folded: Array | None = None
        for g in range(group):
            logits = product(q[g], k[...], (1, 0 if sizes.transposed else 1)) * sizes.scale
            logits = capped(logits, sizes.softcap) - sums[:, g : g + 1]
            if bias is not None:
                logits += bias[...]
            weights = jnp.exp(jnp.where(see, logits, -jnp.inf) if pairwise else logits)
            if score.shape[0] > 1:
                add(g, weights)
            elif folded is None:
                folded = weights
            else:
                folded = jnp.maximum(folded, weights) if reduction.group == "max" else folded + weights
        if folded is not None:
            add(0, folded)
        if reduction.rows == "mean":
            viewers[...] += jnp.sum(see.astype(jnp.float32), axis=0, keepdims=True)

    @pl.when(i == pl.num_programs(2) - 1)
    def _() -> None:
        heads = [score[g : g + 1] for g in range(score.shape[0])]
        total = reduce(jnp.maximum if reduction.group == "max" else jnp.add, heads)
        if reduction.group == "mean":
            total /= group
        if reduction.rows == "mean":
            total /= jnp.maximum(viewers[...], 1.0)
        out[...] = jnp.where(p[...] >= 0, total, 0.0)


def _log_sum_exp(
    sizes: Sizes,
    q: Float[Array, "B*H G W D"],
    t: Int[Array, "B 1 padded"],
    k: Float[Array, "B*H M D"] | Float[Array, "B*H D M"],
    p: Int[Array, "B*H 1 M"],
    biases: list[Float[Array, "B*H 1 M"]],
    interpret: Interpret,
) -> Float[Array, "B*H G padded"]:
    """The log-sum-exp of each query over all keys."""
    heads, G, W, D = q.shape
    rows, padded_rows, keys = sizes.rows, sizes.padded_rows, sizes.keys
    line = pl.BlockSpec((None, 1, keys), lambda n, i, j: (n, 0, j))
    keys_last = pl.BlockSpec((None, D, keys), line.index_map)
    channels_last = pl.BlockSpec((None, keys, D), lambda n, i, j: (n, j, 0))
    return pl.pallas_call(
        partial(_sum_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(heads, W // rows, sizes.key_blocks),
            in_specs=[
                pl.BlockSpec((None, G, rows, D), lambda n, i, j: (n, 0, i, 0)),
                pl.BlockSpec((None, 1, padded_rows), lambda n, i, j: (jax.lax.div(n, sizes.heads), 0, i)),
                keys_last if sizes.transposed else channels_last,
                line,
                *(line for _ in biases),
            ],
            out_specs=pl.BlockSpec((None, G, padded_rows), lambda n, i, j: (n, 0, i)),
            scratch_shapes=[pltpu.VMEM((G, rows), jnp.float32)] * 2,
        ),
        out_shape=jax.ShapeDtypeStruct((heads, G, t.shape[2]), jnp.float32),
        compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="window_log_sum_exp",
    )(q, t, k, p, *biases)


def _sum_kernel(sizes: Sizes, q: Any, t: Any, k: Any, p: Any, *refs: Any) -> None:
    """Adds a tile of keys to the log-sum-exps. Keys come first, so that numbers per query lie along vector lanes."""
    bias, refs = (refs[0], refs[1:]) if sizes.biased else (None, refs)
    out, total, peak = refs
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)
        peak[...] = jnp.full(peak.shape, -jnp.inf, jnp.float32)

    column = as_column(p[...])
    see = (column >= 0) & (column <= t[:, : sizes.rows])
    if sizes.window is not None:
        see &= t[:, : sizes.rows] - column < sizes.window
    if sizes.M % sizes.keys:
        see &= jax.lax.broadcasted_iota(jnp.int32, (sizes.keys, 1), 0) < sizes.M - j * sizes.keys
    for g in range(q.shape[0]):
        logits = capped(product(k[...], q[g], (0 if sizes.transposed else 1, 1)) * sizes.scale, sizes.softcap)
        if bias is not None:
            logits += as_column(bias[...])
        logits = jnp.where(see, logits, -jnp.inf)
        before = peak[g : g + 1]
        new = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        finite = finite_or_zero(new)
        weights = jnp.sum(jnp.exp(logits - finite), axis=0, keepdims=True)
        total[g : g + 1] = total[g : g + 1] * jnp.exp(before - finite) + weights
        peak[g : g + 1] = new

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = jnp.zeros(out.shape, jnp.float32)
        out[:, : sizes.rows] = peak[...] + jnp.log(jnp.maximum(total[...], 1e-37))
