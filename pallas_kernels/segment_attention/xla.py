"""Segment attention in plain XLA: a loop over the tiles of all heads of a lane, a few tiles at a time.

The number of tiles is known only at run time. The loop ends with the tiles of the fullest lane, so time grows with the
number of entries that are held, not with the size of the pool.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..slot_attention.asked import Asked
from ..softmax import RunningSoftmax, capped, finite_or_zero
from ..visibility import visible
from ..window_scores.xla import window_scores
from .pages import PAGE, pages
from .reference import SegmentAttention

TILE_ROWS = 4 * PAGE
TILES = 4  # tiles of a lane per round of the loop; at most so many in all are read without a loop of their own


def put_pages(paged: Array, lane: Int[Array, "P 1"], page: Int[Array, "B P K n"], new: Array) -> Array:
    """Writes tiles of n pages.

    Args:
        paged: an array with axes [B, P, T / PAGE, ..., PAGE].
        page: the numbers of the pages of K tiles. Pages beyond the last one are dropped.
        new: an array with axes [B, P, K, ..., n PAGE].
    """
    B, P, K, n = page.shape
    tiles = jnp.moveaxis(new.reshape(*new.shape[:-1], n, PAGE), -2, 3).reshape(B, P, K * n, *paged.shape[3:])
    return paged.at[jnp.arange(B)[:, None, None], lane, page.reshape(B, P, -1)].set(tiles, mode="drop")


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
    softcap: float | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    asked: Asked | None = None,
) -> SegmentAttention:
    """Computes what the reference defines."""
    B, Hq, W, D = q.shape
    P, T = k_positions.shape[1:]
    H = start.shape[1]
    J, R = H // P, Hq // H * W
    one = J == 1 and T >= TILES * TILE_ROWS  # the tiles of a lane's only head follow each other, and are read as one
    count, size = (1, TILES * TILE_ROWS) if one else (TILES, TILE_ROWS)
    rows = (q * scale).reshape(B, P, J, R, D)
    start, used = start.reshape(B, P, J), used.reshape(B, P, J)
    # Quotients and indices of numbers >= 0: JAX's other forms add operations that XLA compiles for every layer.
    tiles = jax.lax.div(used + (size - 1), size)
    ends = jnp.cumsum(tiles, axis=-1)
    before = start - (ends - tiles) * size  # the row where the tiles of a head would begin if tile 0 were its own
    lane, pool = jnp.arange(P)[:, None], jax.tree.map(jnp.asarray, (k, v, k_positions, bias))

    def per_head(x: Array, head: Int[Array, "B P tiles"]) -> Array:
        """Takes the entry of each tile's head from an array with axes [B, P, J, ...]."""
        index = head.reshape(*head.shape, *(1,) * (x.ndim - 3))
        return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")

    def add(i: Array, carry: tuple[Any, RunningSoftmax, Any, Any]) -> tuple[Any, RunningSoftmax, Any, Any]:
        """Adds round i of tiles, and writes their logits and scores. Tiles beyond the last of a lane are masked."""
        room, running, stored, scores = carry
        number = i * count + jnp.arange(count)
        head = jnp.minimum(jnp.sum(number[:, None] >= ends[:, :, None], axis=-1), J - 1)
        first, own = number * size + per_head(before, head), head[..., None] == jnp.arange(J)
        stop = per_head(start + used, head)
        row = jnp.where(first < stop, jnp.minimum(first, max(T - size, 0)), 0)  # a tile ends within its lane
        page = jax.lax.div(row, PAGE)[..., None] + jnp.arange(size // PAGE)
        read = _read(room, pool, row, size)
        k_tiles, v_tiles, tile_positions, tile_bias = jax.tree.map(lambda x: x.reshape(B, P, count, *x.shape[1:]), read)
        keys, values = plain(k_tiles), plain(v_tiles)
        of_tile = row[..., None] + jnp.arange(size)
        occupied = (of_tile >= first[..., None]) & (of_tile < stop[..., None])
        # Without the barriers XLA computes positions and visibility anew for every query row, and logits twice.
        at = jax.lax.optimization_barrier(jnp.where(occupied, tile_positions, -1).reshape(B, -1, size))
        seen = visible(q_positions, at, window)
        found = jnp.einsum("BPKSD,BPKRD->BPKSR", keys, per_head(rows, head), preferred_element_type=jnp.float32)
        found = capped(jnp.swapaxes(jax.lax.optimization_barrier(found), 3, 4), softcap)
        if tile_bias is not None:
            found += tile_bias[:, :, :, None]
        masked = jnp.where(seen.reshape(B, P, count, 1, W, size), found.reshape(B, P, count, R // W, W, size), -jnp.inf)
        masked = jax.lax.optimization_barrier(masked.reshape(B, P, count, R, size))
        held = jnp.where(jnp.any(occupied.reshape(*page.shape, PAGE), axis=-1), page, T // PAGE)
        if logits:
            stored = put_pages(stored, lane, held, masked)
        if asked is not None:
            by_tile = (per_head(x.reshape(B, P, J, -1, *x.shape[2:]), head) for x in (asked.queries, asked.lse))
            queries, lse = (x.reshape(B, -1, *x.shape[4:]) for x in by_tile)
            given = window_scores(
                queries,
                keys.reshape(B, -1, size, D),
                asked.positions,
                at,
                lse=lse,
                scale=scale,
                window=window,
                softcap=softcap,
                bias=None if tile_bias is None else tile_bias.reshape(at.shape),
                reduction=asked.reduction,
            )
            scores = put_pages(scores, lane, held, given.reshape(B, P, count, size))
        top = jnp.max(masked, axis=-1)
        weights = jnp.exp(masked - finite_or_zero(top)[..., None])
        total = jnp.sum(weights, axis=-1)
        out = jnp.einsum("BPKRS,BPKSD->BPKRD", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        tops = jnp.where(own[..., None], top[:, :, :, None], -jnp.inf)
        peak = jnp.maximum(running.peak, jnp.max(tops, axis=2))
        shrink, share = jnp.exp(running.peak - finite_or_zero(peak)), jnp.exp(tops - finite_or_zero(peak)[:, :, None])
        summed = running.out * shrink[..., None]
        for n in range(count):  # elementwise, and so in one pass over the state
            summed += share[:, :, n, ..., None] * out[:, :, n, None]
        running = RunningSoftmax(summed, running.total * shrink + jnp.sum(share * total[:, :, :, None], axis=2), peak)
        return None if room is None else read, running, stored, scores

    zeros = jnp.zeros((B, P, J, R), jnp.float32)
    begin = (
        _room(pool, count, size),
        RunningSoftmax(jnp.zeros((B, P, J, R, D), jnp.float32), zeros, zeros - jnp.inf),
        jnp.zeros((B, P, T // PAGE, R, PAGE), jnp.float32) if logits else None,
        None if asked is None else jnp.zeros((B, P, T // PAGE, PAGE), jnp.float32),
    )
    rounds = jax.lax.div(jnp.max(ends[..., -1]) + (count - 1), count)
    _, running, stored, scores = jax.lax.fori_loop(0, rounds, add, begin)
    total = jnp.where(running.total == 0, 1.0, running.total)
    context = (running.out / total[..., None]).reshape(B, Hq, W, D).astype(q.dtype)
    return SegmentAttention(
        context,
        (running.peak + jnp.log(total)).reshape(B, Hq, W),
        None if stored is None else jnp.swapaxes(stored, 2, 3).reshape(B, P, R, T),
        None if scores is None else scores.reshape(B, P, T),
    )


def _room(arrays: Any, count: int, size: int) -> Any:
    """Returns the buffers for a round's `count` tiles of `size` rows of each lane, of arrays with axes [B, P, T, ...].

    None if they are TILES or fewer, which need no room.
    """
    B, P = jax.tree.leaves(arrays)[0].shape[:2]

    def room(x: Array) -> Array:
        return jnp.zeros((B * P * count, size, *x.shape[3:]), x.dtype)

    return None if B * P * count <= TILES else jax.tree.map(room, arrays)


def _read(tiles: Any, arrays: Any, row: Int[Array, "B P tiles"], size: int) -> Any:
    """Reads a tile of `size` rows from each `row` on, of arrays with axes [B, P, T, ...].

    Rows that do not exist are undefined. A CPU copies one slice after another, in less CPU time than a gather of pages
    takes: into `tiles`, [B P tiles, size, ...], or a few of them into an array that need not be initialised.
    """
    B, P, n = row.shape
    T = jax.tree.leaves(arrays)[0].shape[2]

    def by_page(tiles: Any, arrays: Any) -> Any:
        page = (jax.lax.div(row, PAGE)[..., None] + jnp.arange(size // PAGE)).reshape(B, P, -1)
        lane = jnp.arange(P)[:, None]
        return jax.tree.map(lambda x: pages(x, lane, page).reshape(B * P * n, size, *x.shape[3:]), arrays)

    def by_slice(tiles: Any, arrays: Any) -> Any:
        rows, lanes = row.ravel(), jax.tree.map(lambda x: x.reshape(B * P, *x.shape[2:]), arrays)

        def tile(x: Array, lane: Array | int, i: Array | int) -> Array:
            at, shape = [lane, rows[i], *[0] * (x.ndim - 2)], (1, size, *x.shape[2:])
            return jax.lax.dynamic_slice(x, at, shape, allow_negative_indices=False)

        def put(i: Array, tiles: Any) -> Any:
            def one(to: Array, x: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(to, tile(x, jax.lax.div(i, n), i), i, 0)

            return jax.tree.map(one, tiles, lanes)

        if tiles is None:
            return jax.tree.map(lambda x: jnp.concatenate([tile(x, i // n, i) for i in range(B * P * n)]), lanes)
        return jax.lax.fori_loop(0, B * P * n, put, tiles)

    if size > T:
        return by_page(tiles, arrays)
    return jax.lax.platform_dependent(tiles, arrays, cpu=by_slice, default=by_page)
