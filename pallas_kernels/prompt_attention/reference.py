"""Prompt attention in plain XLA: blocked, with a running softmax (FlashAttention, arXiv 2205.14135).

No array has size N x M. One tile has BLOCK_Q queries of each head and BLOCK_K keys. Tiles above the diagonal and tiles
beyond the occupied slots are skipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import after_last, pad
from ..exponential import exp
from ..softcap import capped
from ..softmax import RunningSoftmax
from ..visibility import visible

BLOCK_Q = 256
BLOCK_K = 512


def prompt_attention(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Causal attention, by position, of N new tokens over M = S + N entries.

    The last N entries are the new tokens themselves, in the order of the queries. The S entries before them are cached
    slots in any order.

    Args:
        q_positions: consecutive for the tokens of a row; -1 for padding, which is on the left.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each entry.

    Returns:
        The context in q's dtype, and the float32 log-sum-exp of each query's scaled logits, -inf if it sees nothing.
    """
    B, Hq, N, D = q.shape
    H, S = k.shape[1], k.shape[2] - N
    G = Hq // H
    block = min(BLOCK_Q, N)
    padding = -N % block
    q = pad(q * scale, padding, axis=2).reshape(B, H, G, N + padding, D)
    t = pad(q_positions, padding, axis=1, value=-1)
    occupied = jnp.max(after_last(k_positions[..., :S] >= 0))

    def add_tile(
        running: RunningSoftmax, rows: Array, t_rows: Array, start: Array, size: int, skip: Array
    ) -> RunningSoftmax:
        """Adds `size` entries from `start` on. The first `skip` of them have been added before and are masked."""
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (k, v))
        p = jax.lax.dynamic_slice_in_dim(k_positions, start, size, axis=2)
        p = jnp.where(jnp.arange(size) >= skip, p, -1)
        logits = jnp.einsum("BHRD,BHKD->BHRK", rows, keys, preferred_element_type=jnp.float32)
        logits = capped(logits, softcap)
        if bias is not None:
            logits = logits + jax.lax.dynamic_slice_in_dim(bias, start, size, axis=2)[:, :, None]
        seen = visible(t_rows, p, window)[:, :, None]
        logits = jnp.where(seen, logits.reshape(B, H, G, -1, size), -jnp.inf).reshape(logits.shape)
        peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1))
        finite = jnp.where(jnp.isneginf(peak), 0.0, peak)
        weights = exp(logits - finite[..., None])
        shrink = exp(running.peak - finite)
        out = jnp.einsum("BHRK,BHKD->BHRD", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return RunningSoftmax(
            running.out * shrink[..., None] + out, running.total * shrink + jnp.sum(weights, axis=-1), peak
        )

    def add_entries(
        running: RunningSoftmax, rows: Array, t_rows: Array, first: int, length: int, bound: Array
    ) -> RunningSoftmax:
        """Adds the first `bound` of the `length` entries from `first` on, tile by tile."""
        size = min(BLOCK_K, length)

        def add(j: Array, running: RunningSoftmax) -> RunningSoftmax:
            # The last tile may reach back over entries that have been added before.
            start = jnp.minimum(j * size, length - size)
            return add_tile(running, rows, t_rows, first + start, size, j * size - start)

        return jax.lax.fori_loop(0, (bound + size - 1) // size, add, running)

    def query_block(i: Array) -> tuple[Array, Array]:
        rows = jax.lax.dynamic_slice_in_dim(q, i * block, block, axis=3).reshape(B, H, G * block, D)
        t_rows = jax.lax.dynamic_slice_in_dim(t, i * block, block, axis=1)
        running = RunningSoftmax(
            jnp.zeros((B, H, G * block, D), jnp.float32),
            jnp.zeros((B, H, G * block), jnp.float32),
            jnp.full((B, H, G * block), -jnp.inf, jnp.float32),
        )
        if S:
            running = add_entries(running, rows, t_rows, 0, S, occupied)
        running = add_entries(running, rows, t_rows, S, N, jnp.minimum((i + 1) * block, N))
        total = jnp.where(running.total == 0, 1.0, running.total)
        return (running.out / total[..., None]).astype(v.dtype), running.peak + jnp.log(total)

    out, lse = jax.lax.map(query_block, jnp.arange((N + padding) // block))
    out = jnp.moveaxis(out.reshape(-1, B, H, G, block, D), 0, 3).reshape(B, Hq, N + padding, D)
    lse = jnp.moveaxis(lse.reshape(-1, B, H, G, block), 0, 3).reshape(B, Hq, N + padding)
    return out[:, :, :N], lse[:, :, :N]
