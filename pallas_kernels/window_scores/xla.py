"""Window scores in plain XLA: the attention that each key received, recomputed tile by tile from q, k and log-sum-exp.

No array has size W x M.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..arrays import fold, pad
from ..softmax import capped
from ..visibility import visible
from .reduction import DEFAULT_REDUCTION, Reduction

BLOCK_Q = 256
BLOCK_K = 256  # keys per tile, at least
TILE_LOGITS = 1 << 18  # logits per tile and kv head; with few queries, a tile has more keys


def begun(reduction: Reduction, weights: Float[Array, "B H K G R"]) -> Float[Array, "B H K F"]:
    """Reduces over R of the queries, and over the group (F = 1) unless it comes after all queries (F = G)."""
    over_rows = jnp.max if reduction.rows == "max" else jnp.sum
    if reduction.commutes:
        return over_rows(weights, axis=(3, 4))[..., None] / (weights.shape[3] if reduction.group == "mean" else 1)
    if reduction.first == "group":
        return over_rows(fold(weights, reduction.of_group, axis=3), axis=3)[..., None]
    return over_rows(weights, axis=4)


def ended(
    reduction: Reduction,
    score: Float[Array, "B H K F"],
    viewers: Int[Array, "B H K"],
    k_positions: Int[Array, "B H K"],
) -> Float[Array, "B H K"]:
    """The scores of all queries, whose parts `begun` has reduced, and of which `viewers` see each key."""
    if reduction.rows == "mean":
        score = score / jnp.maximum(viewers, 1)[..., None]
    return jnp.where(k_positions >= 0, fold(score, reduction.of_group, axis=3), 0.0)


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
) -> Float[Array, "B H M"]:
    """Computes what the reference defines."""
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    rows = min(BLOCK_Q, W)
    keys = min(max(BLOCK_K, TILE_LOGITS // (G * rows)), M)
    q = pad(q * scale, -W % rows, axis=2).reshape(B, H, G, -1, D)
    t = pad(q_positions, -W % rows, axis=1, value=-1)
    k = pad(k, -M % keys, axis=2)
    p = pad(k_positions, -M % keys, axis=2, value=-1)
    added = None if bias is None else pad(bias, -M % keys, axis=2)
    blocks = t.shape[1] // rows
    newest = jnp.max(t.reshape(B, blocks, rows), axis=(0, 2))
    pairwise = causal or window is not None

    def logits_of(i: Array, j: Array) -> Float[Array, "B H K G R"]:
        """A tile's logits. Keys come first, so that sums over queries and group run along vector lanes."""
        q_tile = jax.lax.dynamic_slice_in_dim(q, i * rows, rows, axis=3).reshape(B, H, G * rows, D)
        k_tile = jax.lax.dynamic_slice_in_dim(k, j * keys, keys, axis=2)
        logits = jnp.einsum("BHKD,BHRD->BHKR", k_tile, q_tile, preferred_element_type=jnp.float32)
        logits = capped(logits.reshape(B, H, keys, G, rows), softcap)
        if added is None:
            return logits
        return logits + jax.lax.dynamic_slice_in_dim(added, j * keys, keys, axis=2)[..., None, None]

    def seen_of(i: Array, j: Array) -> Bool[Array, "B H K R"]:
        t_tile = jax.lax.dynamic_slice_in_dim(t, i * rows, rows, axis=1)
        p_tile = jax.lax.dynamic_slice_in_dim(p, j * keys, keys, axis=2)
        if pairwise:
            return jnp.swapaxes(visible(t_tile, p_tile, window), 2, 3)
        return (p_tile >= 0)[..., None] & (t_tile >= 0)[:, None, None]

    def row_lse(i: Array) -> Float[Array, "B H G R"]:
        def add(j: Array, total: Array) -> Array:
            logits = jnp.where(seen_of(i, j)[:, :, :, None], logits_of(i, j), -jnp.inf)
            return jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=2))

        return jax.lax.fori_loop(0, k.shape[2] // keys, add, jnp.full((B, H, G, rows), -jnp.inf))

    if lse is None:
        lse_blocks = jax.lax.map(row_lse, jnp.arange(blocks))
    else:
        lse_blocks = pad(lse, -W % rows, axis=2).reshape(B, H, G, blocks, rows)
        lse_blocks = jnp.moveaxis(lse_blocks, 3, 0)
    # Padding, and queries that see nothing, give no weight.
    padding = jnp.moveaxis(t.reshape(B, blocks, rows), 1, 0)[:, :, None, None] < 0
    lse_blocks = jnp.where(padding | jnp.isneginf(lse_blocks), jnp.inf, lse_blocks)

    def key_block(j: Array) -> Float[Array, "B H K"]:
        positions = jax.lax.dynamic_slice_in_dim(p, j * keys, keys, axis=2)

        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            score, viewers = carry
            logits = logits_of(i, j) - lse_blocks[i][:, :, None]
            if pairwise:
                logits = jnp.where(seen_of(i, j)[:, :, :, None], logits, -jnp.inf)
            tile = begun(reduction, jnp.exp(logits))
            score = jnp.maximum(score, tile) if reduction.rows == "max" else score + tile
            return score, viewers + jnp.sum(seen_of(i, j), axis=3) if reduction.rows == "mean" else viewers

        oldest = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max))
        start = jnp.argmax(newest >= oldest)  # earlier blocks of queries see no key of this tile
        weights = jax.ShapeDtypeStruct((B, H, keys, G, rows), jnp.float32)
        score_shape = jax.eval_shape(partial(begun, reduction), weights).shape
        carry = (jnp.zeros(score_shape, jnp.float32), jnp.zeros((B, H, keys), jnp.int32))
        score, viewers = jax.lax.fori_loop(start, blocks, add, carry) if blocks > 1 else add(jnp.int32(0), carry)
        return ended(reduction, score, viewers, positions)

    if k.shape[2] == keys:
        return key_block(jnp.int32(0))[..., :M]
    scores = jax.lax.map(key_block, jnp.arange(k.shape[2] // keys))
    return jnp.moveaxis(scores, 0, 2).reshape(B, H, -1)[..., :M]
