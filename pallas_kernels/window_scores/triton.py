"""Attention received by each key on GPUs, by Triton: weights are made and reduced in registers, tile by tile.

Each key is read once. Where the queries fit into one tile, a program holds these and walks over several tiles of keys;
where they do not, it holds a tile of keys and walks over the queries that see it.
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

from ..blocks import Blocks, Work, measured, power_of_two
from ..tiling import after_last, pad
from ..triton_attention import PROGRAMS, attend, check, product
from ..visibility import ends, sees
from .reference import Reduction

DEFAULT = Reduction()


def blocks_for(rows: int, k: Any) -> Blocks:
    """As measured on this GPU, or by the number of query rows that are reduced as one, the head dimension and dtype."""
    found = measured(Work.of("window_scores", rows, k))
    if found is not None:
        return found
    if jnp.dtype(k.dtype).itemsize == 4 or k.shape[-1] > 128:
        return Blocks(min(power_of_two(rows), 32), 32, warps=4, stages=2)
    if rows <= 128:
        return Blocks(power_of_two(rows), 64, warps=4, stages=3)
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
    bias: Float[Array, "B H M"] | None = None,
    causal: bool = True,
    reduction: Reduction = DEFAULT,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B H M"]:
    """As the reference.

    Raises:
        NotImplementedError: for mixed or other dtypes than float32, bfloat16 and float16, and for more than 256
            channels a head.
    """
    check(q, k, None)
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    q = q.reshape(B, H, G, W, D)
    bound = after_last(k_positions >= 0)
    if lse is None:
        options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "interpret": interpret}
        lse = attend(q.reshape(B, H, -1, D), k, None, q_positions, k_positions, bound, **options).lse
    # A query that sees nothing, or is none, weighs nothing.
    lse = lse.reshape(B, H, G, W)
    lse = jnp.where((q_positions < 0)[:, None, None] | jnp.isneginf(lse), jnp.inf, lse)
    t = q_positions
    together = (reduction.rows == "max") == (reduction.group == "max")
    if together:  # the two reductions are one, over rows in the order of their queries
        q, lse = (jnp.swapaxes(x, 2, 3).reshape(B, H, 1, W * G, *x.shape[4:]) for x in (q, lse))
        t = jnp.repeat(t, G, axis=1)
    blocks = blocks or blocks_for(q.shape[3], k)
    spare = -q.shape[3] % blocks.rows
    q, lse, t = pad(q, spare, 3), pad(lse, spare, 3, jnp.inf), pad(t, spare, 1, -1)
    F, R = q.shape[2:4]
    row_blocks, tiles, Dp = R // blocks.rows, pl.cdiv(M, blocks.slots), power_of_two(D)
    span, each = None, 1
    if row_blocks > 1 or F > 1:
        span = ends(sees(t, k_positions, rows=blocks.rows, keys=blocks.slots, window=window, causal=causal))
    else:
        each = min(max(tiles * H * B // (4 * PROGRAMS), 1), 32)

    def head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda j, h, b: (b, h, *(0,) * len(shape)))

    kernel = partial(
        window_scores_kernel,
        blocks=blocks,
        sizes=(F, R, D, M),
        each=each,
        shared=G if together else 1,
        group=G,
        scale=scale,
        window=window,
        pairwise=causal or window is not None,
        reduction=reduction,
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tiles, each), H, B),
        in_specs=[
            head(F * R, Dp),
            head(M, Dp),
            pl.BlockSpec((None, R), lambda j, h, b: (b, 0)),
            head(M),
            head(F * R),
            head(),
            None if bias is None else head(M),
            None if span is None else head(tiles, 2),
        ],
        out_specs=head(M),
        out_shape=jax.ShapeDtypeStruct((B, H, M), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
    )(q.reshape(B, H, F * R, D), k, t, k_positions, lse.reshape(B, H, F * R), bound, bias, span)


def window_scores_kernel(
    q_ref: Any,
    k_ref: Any,
    t_ref: Any,
    p_ref: Any,
    lse_ref: Any,
    bound_ref: Any,
    bias_ref: Any,
    span_ref: Any,
    scores_ref: Any,
    *,
    blocks: Blocks,
    sizes: tuple[int, int, int, int],
    each: int,
    shared: int,
    group: int,
    scale: float,
    window: int | None,
    pairwise: bool,
    reduction: Reduction,
) -> None:
    F, R, D, M = sizes
    Dp = q_ref.shape[-1]
    channel = (jnp.arange(Dp) < D)[None]
    over_rows: Callable[..., Array] = jnp.max if reduction.rows == "max" else jnp.sum
    join_rows = jnp.maximum if reduction.rows == "max" else jnp.add
    join_group = jnp.maximum if reduction.group == "max" else jnp.add

    def queries_of(f: Array | int, i: Array | int) -> tuple[Array, Array]:
        """A block of a head's queries, with their log-sum-exps."""
        place = pl.ds(f * R + i * blocks.rows, blocks.rows)
        return plgpu.load(q_ref.at[place, :], mask=channel, other=0), lse_ref[place]

    def positions_of(i: Array | int) -> Array:
        return t_ref[pl.ds(i * blocks.rows, blocks.rows)][None]

    def keys_of(j: Array) -> tuple[Array, Array, Array | None]:
        held = j * blocks.slots + jnp.arange(blocks.slots) < M
        place = pl.ds(j * blocks.slots, blocks.slots)
        keys = plgpu.load(k_ref.at[place, :], mask=held[:, None] & channel, other=0)
        bias = None if bias_ref is None else plgpu.load(bias_ref.at[place], mask=held, other=0)[:, None]
        return keys, plgpu.load(p_ref.at[place], mask=held, other=-1)[:, None], bias

    def visible(t: Array, p: Array) -> Array:
        seen = p >= 0
        if pairwise:
            seen = seen & (p <= t)
        return seen if window is None else seen & (t - p < window)

    def weights(queries: tuple[Array, Array], t: Array, entries: tuple[Array, Array, Array | None]) -> Array:
        """Of a tile, keys first: a sum over rows then stays within a warp."""
        (q, lse), (keys, p, bias) = queries, entries
        logits = product(keys, q.T) * scale - lse[None]
        if bias is not None:
            logits += bias
        return jnp.exp(jnp.where(visible(t, p), logits, -jnp.inf))

    def viewers(t: Array, p: Array) -> Array:
        """How many rows see each key."""
        return jnp.sum((visible(t, p) & (t >= 0)).astype(jnp.float32), axis=1)

    def write(j: Array, score: Array, seen: Array | None) -> None:
        if seen is not None:
            score = score / jnp.maximum(seen / shared, 1.0)
        if reduction.group == "mean":
            score = score / group
        held = j * blocks.slots + jnp.arange(blocks.slots) < M
        plgpu.store(scores_ref.at[pl.ds(j * blocks.slots, blocks.slots)], score, mask=held)

    nothing = jnp.zeros(blocks.slots, jnp.float32)
    if span_ref is None:
        queries, t = queries_of(0, 0), positions_of(0)

        def score(j: Array, _: None) -> None:
            entries = keys_of(j)
            seen = viewers(t, entries[1]) if reduction.rows == "mean" else None
            write(j, over_rows(weights(queries, t, entries), axis=1), seen)

        first = pl.program_id(0) * each
        last = jnp.minimum(first + each, pl.cdiv(M, blocks.slots))
        occupied = jnp.clip(jax.lax.div(bound_ref[()] + blocks.slots - 1, blocks.slots), first, last)
        jax.lax.fori_loop(first, occupied, score, None)
        jax.lax.fori_loop(occupied, last, lambda j, _: write(j, nothing, None), None)
        return
    j = pl.program_id(0)
    entries = keys_of(j)

    def over_blocks(add: Callable[[Array], Array], join: Callable[..., Array]) -> Array:
        """`add(i)` of each block of rows that sees some of the keys, joined."""
        return jax.lax.fori_loop(span_ref[j, 0], span_ref[j, 1], lambda i, x: join(x, add(i)), nothing)

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
