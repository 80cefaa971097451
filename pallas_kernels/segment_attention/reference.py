"""Segment attention in plain XLA: a loop over the tiles of all heads of a lane, a few tiles at a time.

The number of tiles is known only at run time. The loop ends with the tiles of the fullest lane, so time grows with the
number of entries that are held, not with the size of the pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..softmax import RunningSoftmax
from ..visibility import visible

PAGE = 16  # rows of a pool; segments begin at multiples of it
TILE_ROWS = 8 * PAGE
TILES = 4  # tiles of a lane per round of the loop


def pages(x: Array, lane: Int[Array, "... #n"], page: Int[Array, "... n"]) -> Array:
    """Gathers pages of a pool.

    Args:
        x: an array with axes [B, P, T, ...].
        lane: the lane of each page.
        page: the number of each page in its lane. A number beyond the last page gives the last.

    Returns:
        An array with axes [B, ..., n, PAGE, ...].
    """
    B, P, T = x.shape[:3]
    row = jnp.arange(B).reshape(B, *(1,) * (page.ndim - 1))
    return jnp.asarray(x).reshape(B, P, T // PAGE, PAGE, *x.shape[3:]).at[row, lane, page].get(mode="clip")


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
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
    """Attention of W query rows over the segments of a pool; W is small.

    A lane of the pool holds the segments of J = H / P consecutive kv heads.

    Args:
        k_positions: -1 for empty rows of the pool.
        start: the first row of a head's segment in its lane, a multiple of PAGE.
        used: the number of rows, from `start` on, that may hold entries. No row after them is read, except in the rest
            of the last tile.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        bias: float32, added to the scaled logits of each row of the pool.

    Returns:
        The context in q's dtype, 0 where nothing is visible, and the float32 log-sum-exp of the scaled logits, -inf
        where nothing is visible.
    """
    B, Hq, W, D = q.shape
    P = k_positions.shape[1]
    H = start.shape[1]
    J, R = H // P, Hq // H * W
    rows = (q * scale).reshape(B, P, J, R, D)
    start, used = start.reshape(B, P, J), used.reshape(B, P, J)
    tiles = (used + TILE_ROWS - 1) // TILE_ROWS
    ends = jnp.cumsum(tiles, axis=-1)
    lane = jnp.arange(P)[:, None]

    def per_head(x: Array, head: Int[Array, "B P tiles"]) -> Array:
        """Takes the entry of each tile's head from an array with axes [B, P, J, ...]."""
        return jnp.take_along_axis(x, head.reshape(*head.shape, *(1,) * (x.ndim - 3)), axis=2)

    def add(i: Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds round i of tiles. Tiles beyond the last of a lane are masked."""
        number = i * TILES + jnp.arange(TILES)
        head = jnp.minimum(jnp.sum(number[:, None] >= ends[:, :, None], axis=-1), J - 1)
        first = (number - per_head(ends - tiles, head)) * TILE_ROWS
        page = ((per_head(start, head) + first) // PAGE)[..., None] + jnp.arange(TILE_ROWS // PAGE)

        def tile(x: Array) -> Array:
            return pages(x, lane[..., None], page).reshape(B, P, TILES, TILE_ROWS, *x.shape[3:])

        keys, values = (plain(jax.tree.map(tile, x)) for x in (k, v))
        positions = tile(k_positions)
        occupied = (first[..., None] + jnp.arange(TILE_ROWS) < per_head(used, head)[..., None]) & (
            number < ends[..., -1:]
        )[..., None]
        seen = visible(q_positions, jnp.where(occupied, positions, -1).reshape(B, -1, TILE_ROWS), window)
        logits = jnp.einsum("BPKSD,BPKRD->BPKSR", keys, per_head(rows, head), preferred_element_type=jnp.float32)
        logits = jnp.swapaxes(jax.lax.optimization_barrier(logits), 3, 4)
        if bias is not None:
            logits += tile(bias)[:, :, :, None]
        masked = jnp.where(
            seen.reshape(B, P, TILES, 1, W, TILE_ROWS), logits.reshape(B, P, TILES, R // W, W, TILE_ROWS), -jnp.inf
        ).reshape(B, P, TILES, R, TILE_ROWS)
        own = head[..., None] == jnp.arange(J)
        tops = jnp.where(own[..., None], jnp.max(masked, axis=-1)[:, :, :, None], -jnp.inf)
        peak = jnp.maximum(running.peak, jnp.max(tops, axis=2))
        finite = jnp.where(jnp.isneginf(peak), 0.0, peak)
        shrink = jnp.exp(running.peak - finite)
        weights = jnp.exp(masked - per_head(finite, head)[..., None])
        out = jnp.einsum("BPKRS,BPKSD->BPKRD", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        to_heads = own.astype(jnp.float32)
        return RunningSoftmax(
            running.out * shrink[..., None] + jnp.einsum("BPKRD,BPKJ->BPJRD", out, to_heads, precision="highest"),
            running.total * shrink
            + jnp.einsum("BPKR,BPKJ->BPJR", jnp.sum(weights, axis=-1), to_heads, precision="highest"),
            peak,
        )

    zeros = jnp.zeros((B, P, J, R), jnp.float32)
    begin = RunningSoftmax(jnp.zeros((B, P, J, R, D), jnp.float32), zeros, zeros - jnp.inf)
    rounds = (jnp.max(ends[..., -1]) + TILES - 1) // TILES
    running = jax.lax.fori_loop(0, rounds, add, begin)
    total = jnp.where(running.total == 0, 1.0, running.total)
    context = (running.out / total[..., None]).reshape(B, Hq, W, D).astype(q.dtype)
    return context, (running.peak + jnp.log(total)).reshape(B, Hq, W)
