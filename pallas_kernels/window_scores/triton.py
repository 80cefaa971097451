"""Window scores on GPUs (Triton): weights are computed and reduced in registers, tile by tile.

Each key is read once. If the queries fit into one tile, a program holds them and walks over several tiles of keys.
Otherwise it holds a tile of keys and walks over the blocks of queries that see some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from ..arrays import after_last, pad
from ..softmax import capped
from ..triton.attention import attend
from ..triton.blocks import Blocks, Work, measured, power_of_two
from ..triton.common import PROGRAMS, check, product
from ..visibility import span, visible_tiles
from .reduction import DEFAULT_REDUCTION, Reduction


def score_blocks(rows: int, k: Any, parts: int = 1) -> Blocks:
    """Tile sizes for this GPU: measured, or by rule from the number of rows, the head size and the dtype.

    Args:
        rows: query rows that are reduced together.
        k: keys [..., D].
        parts: the number of such reductions, one after another.
    """
    found = measured(Work.of("window_scores", rows, k))
    if found is not None:
        return found
    if jnp.dtype(k.dtype).itemsize == 4 or k.shape[-1] > 128:
        return Blocks(min(power_of_two(rows), 32), 32, warps=4, stages=2)
    if rows <= 128:
        # Parts of one tile of queries each have no loop to pipeline. A third stage spills on a B200 there.
        return Blocks(power_of_two(rows), 64, warps=4, stages=3 if parts == 1 else 2)
    return Blocks(64, 128, warps=8, stages=3)


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
    interpret: bool = False,
) -> Float[Array, "B H M"]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for a GPU
            that is not NVIDIA's or older than the A100.
    """
    check(q, k, None)
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    q = q.reshape(B, H, G, W, D)
    used = after_last(k_positions >= 0)
    if lse is None:
        over = partial(attend, scale=scale, window=window, softcap=softcap, bias=bias, interpret=interpret)
        lse = over(q.reshape(B, H, -1, D), k, None, q_positions, k_positions, used).lse
    # Padding, and queries that see nothing, give no weight.
    lse = lse.reshape(B, H, G, W)
    lse = jnp.where((q_positions < 0)[:, None, None] | jnp.isneginf(lse), jnp.inf, lse)
    t = q_positions
    if reduction.commutes:  # one reduction over all G W rows, which are in the order of their queries
        q, lse = (jnp.swapaxes(x, 2, 3).reshape(B, H, 1, W * G, *x.shape[4:]) for x in (q, lse))
        t = jnp.repeat(t, G, axis=1)
    blocks = score_blocks(q.shape[3], k, parts=q.shape[2])
    padding = -q.shape[3] % blocks.rows
    q, lse, t = pad(q, padding, 3), pad(lse, padding, 3, jnp.inf), pad(t, padding, 1, -1)
    F, R = q.shape[2:4]
    row_blocks, tiles, Dp = R // blocks.rows, pl.cdiv(M, blocks.slots), power_of_two(D)
    spans, tiles_each = None, 1
    if row_blocks > 1 or F > 1:
        seen = visible_tiles(t, k_positions, rows=blocks.rows, keys=blocks.slots, window=window, causal=causal)
        spans = span(seen)
    else:
        tiles_each = min(max(tiles * H * B // (4 * PROGRAMS), 1), 32)

    def head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda j, h, b: (b, h, *(0,) * len(shape)))

    kernel = partial(
        window_scores_kernel,
        blocks=blocks,
        sizes=(F, R, D, M),
        tiles_each=tiles_each,
        rows_per_query=G if reduction.commutes else 1,
        group=G,
        scale=scale,
        window=window,
        softcap=softcap,
        pairwise=causal or window is not None,
        reduction=reduction,
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tiles, tiles_each), H, B),
        in_specs=[
            head(F * R, Dp),
            head(M, Dp),
            pl.BlockSpec((None, R), lambda j, h, b: (b, 0)),
            head(M),
            head(F * R),
            head(),
            None if bias is None else head(M),
            None if spans is None else head(tiles, 2),
        ],
        out_specs=head(M),
        out_shape=jax.ShapeDtypeStruct((B, H, M), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
    )(q.reshape(B, H, F * R, D), k, t, k_positions, lse.reshape(B, H, F * R), used, bias, spans)


def window_scores_kernel(
    q_ref: Any,
    k_ref: Any,
    t_ref: Any,
    p_ref: Any,
    lse_ref: Any,
    used_ref: Any,
    bias_ref: Any,
    spans_ref: Any,
    scores_ref: Any,
    *,
    blocks: Blocks,
    sizes: tuple[int, int, int, int],
    tiles_each: int,
    rows_per_query: int,
    group: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    pairwise: bool,
    reduction: Reduction,
) -> None:
    """Writes the scores of some tiles of keys: `tiles_each` tiles if there are no spans, else one.

    Args:
        sizes: F (parts of the group that are reduced one after another), R (query rows per part), D and M.
        rows_per_query: rows of a part that are the same query in different heads.
        group: G.
        pairwise: whether positions of queries and keys have to be compared.
    """
    F, R, D, M = sizes
    Dp = q_ref.shape[-1]
    channel = (jnp.arange(Dp) < D)[None]
    over_rows: Callable[..., Array] = jnp.max if reduction.rows == "max" else jnp.sum
    join_rows = jnp.maximum if reduction.rows == "max" else jnp.add
    join_group = jnp.maximum if reduction.group == "max" else jnp.add

    def queries_of(f: Array | int, i: Array | int) -> tuple[Array, Array]:
        """Block i of the queries of part f, and their log-sum-exps."""
        place = pl.ds(f * R + i * blocks.rows, blocks.rows)
        return plgpu.load(q_ref.at[place, :], mask=channel, other=0), lse_ref[place]

    def positions_of(i: Array | int) -> Array:
        return t_ref[pl.ds(i * blocks.rows, blocks.rows)][None]

    def keys_of(j: Array) -> tuple[Array, Array, Array | None]:
        exists = j * blocks.slots + jnp.arange(blocks.slots) < M
        place = pl.ds(j * blocks.slots, blocks.slots)
        keys = plgpu.load(k_ref.at[place, :], mask=exists[:, None] & channel, other=0)
        bias = None if bias_ref is None else plgpu.load(bias_ref.at[place], mask=exists, other=0)[:, None]
        return keys, plgpu.load(p_ref.at[place], mask=exists, other=-1)[:, None], bias

    def sees(t: Array, p: Array) -> Array:
        seen = p >= 0
        if pairwise:
            seen = seen & (p <= t)
        return seen if window is None else seen & (t - p < window)

    def weights(queries: tuple[Array, Array], t: Array, entries: tuple[Array, Array, Array | None]) -> Array:
        """The weights of a tile. Keys come first, so that a sum over rows stays within a warp."""
        (q, lse), (keys, p, bias) = queries, entries
        logits = capped(product(keys, q.T) * scale, softcap) - lse[None]
        if bias is not None:
            logits += bias
        return jnp.exp(jnp.where(sees(t, p), logits, -jnp.inf))

    def viewers(t: Array, p: Array) -> Array:
        """The number of rows that see each key."""
        return jnp.sum((sees(t, p) & (t >= 0)).astype(jnp.float32), axis=1)

    def write(j: Array, score: Array, seen: Array | None) -> None:
        if seen is not None:
            score = score / jnp.maximum(seen / rows_per_query, 1.0)
        if reduction.group == "mean":
            score = score / group
        exists = j * blocks.slots + jnp.arange(blocks.slots) < M
        plgpu.store(scores_ref.at[pl.ds(j * blocks.slots, blocks.slots)], score, mask=exists)

    zeros = jnp.zeros(blocks.slots, jnp.float32)
    if spans_ref is None:
        queries, t = queries_of(0, 0), positions_of(0)

        def score(j: Array, _: None) -> None:
            entries = keys_of(j)
            seen = viewers(t, entries[1]) if reduction.rows == "mean" else None
            write(j, over_rows(weights(queries, t, entries), axis=1), seen)

        first = pl.program_id(0) * tiles_each
        last = jnp.minimum(first + tiles_each, pl.cdiv(M, blocks.slots))
        occupied = jnp.clip(jax.lax.div(used_ref[()] + blocks.slots - 1, blocks.slots), first, last)
        jax.lax.fori_loop(first, occupied, score, None)
        jax.lax.fori_loop(occupied, last, lambda j, _: write(j, zeros, None), None)
        return
    j = pl.program_id(0)
    entries = keys_of(j)

    def over_blocks(add: Callable[[Array], Array], join: Callable[..., Array]) -> Array:
        """Joins add(i) of each block i of rows that sees some of the keys."""
        return jax.lax.fori_loop(spans_ref[j, 0], spans_ref[j, 1], lambda i, x: join(x, add(i)), zeros)

    def tile(f: Array | int, i: Array) -> Array:
        return weights(queries_of(f, i), positions_of(i), entries)

    if F == 1 or reduction.first == "rows":

        def of_head(f: int) -> Array:
            return over_blocks(lambda i: over_rows(tile(f, i), axis=1), join_rows)

        received = reduce(join_group, map(of_head, range(F)))
    else:

        def group_tile(i: Array) -> Array:
            return jax.lax.fori_loop(1, F, lambda f, x: join_group(x, tile(f, i)), tile(0, i))

        received = over_blocks(lambda i: over_rows(group_tile(i), axis=1), join_rows)
    seen = over_blocks(lambda i: viewers(positions_of(i), entries[1]), jnp.add) if reduction.rows == "mean" else None
    write(j, received, seen)
