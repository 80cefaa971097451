"""Segment attention in plain XLA: a list of tiles of all heads of a lane, worked off a few at a time.

How many there are is known only when it runs: a loop goes on for as long as the fullest lane has tiles, so that time
follows what is held and not what could be.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..visibility import visible

PAGE = 16  # rows; segments begin at multiples of it
TILE = 8 * PAGE
TILES = 4  # at a time


class Running(NamedTuple):
    """A softmax under way for the R = G W query rows of each of a lane's J heads."""

    out: Float[Array, "B P J R D"]
    total: Float[Array, "B P J R"]
    peak: Float[Array, "B P J R"]


def pages(x: Array, lane: Int[Array, "... #n"], page: Int[Array, "... n"]) -> Array:
    """Pages of a pool with axes [B, P, T, ...], as [B, ..., n, PAGE, ...]; numbers beyond the last give the last."""
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
    """Attention of W (few) query rows over segments of a pool of P lanes, H / P consecutive kv heads to each.

    Args:
        k_positions: -1 for rows of the pool that hold nothing.
        start: the row, a multiple of PAGE, where a head's segment begins in its lane.
        used: rows of the segment, counted from there, beyond which it holds nothing. No row after them is read but for
            what is left of the last tile.
        bias: added to the logits of each row of the pool.

    Returns:
        The context in q's dtype and the float32 log-sum-exp of the scaled logits (-inf where nothing is visible, and
        the context then 0).
    """
    B, Hq, W, D = q.shape
    P = k_positions.shape[1]
    H = start.shape[1]
    J, R = H // P, Hq // H * W
    rows = (q * scale).reshape(B, P, J, R, D)
    start, used = start.reshape(B, P, J), used.reshape(B, P, J)
    tiles = (used + TILE - 1) // TILE
    ends = jnp.cumsum(tiles, axis=-1)
    lane = jnp.arange(P)[:, None]

    def per_head(x: Array, head: Int[Array, "B P K"]) -> Array:
        """What belongs to the head of each tile, from [B, P, J, ...]."""
        return jnp.take_along_axis(x, head.reshape(*head.shape, *(1,) * (x.ndim - 3)), axis=2)

    def add(i: Array, running: Running) -> Running:
        item = i * TILES + jnp.arange(TILES)
        head = jnp.minimum(jnp.sum(item[:, None] >= ends[:, :, None], axis=-1), J - 1)
        first = (item - per_head(ends - tiles, head)) * TILE
        page = ((per_head(start, head) + first) // PAGE)[..., None] + jnp.arange(TILE // PAGE)

        def tile(x: Array) -> Array:
            return pages(x, lane[..., None], page).reshape(B, P, TILES, TILE, *x.shape[3:])

        keys, values = (plain(jax.tree.map(tile, x)) for x in (k, v))
        positions = tile(k_positions)
        held = (first[..., None] + jnp.arange(TILE) < per_head(used, head)[..., None]) & (item < ends[..., -1:])[
            ..., None
        ]
        seen = visible(q_positions, jnp.where(held, positions, -1).reshape(B, -1, TILE), window)
        logits = jnp.einsum("BPKSD,BPKRD->BPKSR", keys, per_head(rows, head), preferred_element_type=jnp.float32)
        logits = jnp.swapaxes(jax.lax.optimization_barrier(logits), 3, 4)
        if bias is not None:
            logits += tile(bias)[:, :, :, None]
        masked = jnp.where(
            seen.reshape(B, P, TILES, 1, W, TILE), logits.reshape(B, P, TILES, R // W, W, TILE), -jnp.inf
        ).reshape(B, P, TILES, R, TILE)
        own = head[..., None] == jnp.arange(J)
        tops = jnp.where(own[..., None], jnp.max(masked, axis=-1)[:, :, :, None], -jnp.inf)
        peak = jnp.maximum(running.peak, jnp.max(tops, axis=2))
        finite = jnp.where(jnp.isneginf(peak), 0.0, peak)
        shrink = jnp.exp(running.peak - finite)
        weights = jnp.exp(masked - per_head(finite, head)[..., None])
        out = jnp.einsum("BPKRS,BPKSD->BPKRD", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        to_heads = own.astype(jnp.float32)
        return Running(
            running.out * shrink[..., None] + jnp.einsum("BPKRD,BPKJ->BPJRD", out, to_heads, precision="highest"),
            running.total * shrink
            + jnp.einsum("BPKR,BPKJ->BPJR", jnp.sum(weights, axis=-1), to_heads, precision="highest"),
            peak,
        )

    nothing = jnp.zeros((B, P, J, R), jnp.float32)
    begin = Running(jnp.zeros((B, P, J, R, D), jnp.float32), nothing, nothing - jnp.inf)
    rounds = (jnp.max(ends[..., -1]) + TILES - 1) // TILES
    running = jax.lax.fori_loop(0, rounds, add, begin)
    total = jnp.where(running.total == 0, 1.0, running.total)
    context = (running.out / total[..., None]).reshape(B, Hq, W, D).astype(q.dtype)
    return context, (running.peak + jnp.log(total)).reshape(B, Hq, W)
