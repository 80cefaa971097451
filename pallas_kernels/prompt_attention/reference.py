"""Blocked attention with a running softmax (FlashAttention, arXiv 2205.14135) in plain XLA.

Nothing of size N x M is ever held: one tile of BLOCK_Q queries a head group by BLOCK_K keys at a time. Tiles above
the diagonal and beyond the occupied slots are not visited.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..tiling import after_last, pad
from ..visibility import visible

BLOCK_Q = 256
BLOCK_K = 512


class Running(NamedTuple):
    """A softmax under way: output so far (not yet divided), sum of exponentials, maximum."""

    out: Float[Array, "B H R D"]
    total: Float[Array, "B H R"]
    peak: Float[Array, "B H R"]


def prompt_attention(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B H M"] | None = None,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Causal attention by position, of N new tokens over M = S + N entries.

    The last N entries are the queries' own tokens in the same order; the S before them are cached slots in any order.

    Args:
        q_positions: those of a row's tokens follow each other; -1 for padding, which is on the left.
        bias: float32, added to the scaled logits of each entry.

    Returns:
        The context in q's dtype, and the float32 log-sum-exp of each query's scaled logits (-inf if it sees nothing).
    """
    B, Hq, N, D = q.shape
    H, S = k.shape[1], k.shape[2] - N
    G = Hq // H
    block = min(BLOCK_Q, N)
    padding = -N % block
    q = pad(q * scale, padding, axis=2).reshape(B, H, G, N + padding, D)
    t = pad(q_positions, padding, axis=1, value=-1)
    occupied = jnp.max(after_last(k_positions[..., :S] >= 0))

    def tile(running: Running, rows: Array, t_rows: Array, start: Array, size: int, skip: Array) -> Running:
        """Adds `size` entries from `start` on, of which the first `skip` were counted before."""
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (k, v))
        p = jax.lax.dynamic_slice_in_dim(k_positions, start, size, axis=2)
        p = jnp.where(jnp.arange(size) >= skip, p, -1)
        logits = jnp.einsum("BHRD,BHKD->BHRK", rows, keys, preferred_element_type=jnp.float32)
        if bias is not None:
            logits = logits + jax.lax.dynamic_slice_in_dim(bias, start, size, axis=2)[:, :, None]
        seen = visible(t_rows, p, window)[:, :, None]
        logits = jnp.where(seen, logits.reshape(B, H, G, -1, size), -jnp.inf).reshape(logits.shape)
        peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1))
        finite = jnp.where(jnp.isneginf(peak), 0.0, peak)
        weights = jnp.exp(logits - finite[..., None])
        shrink = jnp.exp(running.peak - finite)
        out = jnp.einsum("BHRK,BHKD->BHRD", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return Running(running.out * shrink[..., None] + out, running.total * shrink + jnp.sum(weights, axis=-1), peak)

    def segment(running: Running, rows: Array, t_rows: Array, first: int, length: int, bound: Array) -> Running:
        """Adds entries first .. first + bound of a segment of `length` entries, tile by tile."""
        size = min(BLOCK_K, length)

        def add(j: Array, running: Running) -> Running:
            start = jnp.minimum(j * size, length - size)  # the last tile may reach back over entries already counted
            return tile(running, rows, t_rows, first + start, size, j * size - start)

        return jax.lax.fori_loop(0, (bound + size - 1) // size, add, running)

    def query_block(i: Array) -> tuple[Array, Array]:
        rows = jax.lax.dynamic_slice_in_dim(q, i * block, block, axis=3).reshape(B, H, G * block, D)
        t_rows = jax.lax.dynamic_slice_in_dim(t, i * block, block, axis=1)
        running = Running(
            jnp.zeros((B, H, G * block, D), jnp.float32),
            jnp.zeros((B, H, G * block), jnp.float32),
            jnp.full((B, H, G * block), -jnp.inf, jnp.float32),
        )
        if S:
            running = segment(running, rows, t_rows, 0, S, occupied)
        running = segment(running, rows, t_rows, S, N, jnp.minimum((i + 1) * block, N))
        total = jnp.where(running.total == 0, 1.0, running.total)
        return (running.out / total[..., None]).astype(v.dtype), running.peak + jnp.log(total)

    out, lse = jax.lax.map(query_block, jnp.arange((N + padding) // block))
    out = jnp.moveaxis(out.reshape(-1, B, H, G, block, D), 0, 3).reshape(B, Hq, N + padding, D)
    lse = jnp.moveaxis(lse.reshape(-1, B, H, G, block), 0, 3).reshape(B, Hq, N + padding)
    return out[:, :, :N], lse[:, :, :N]
