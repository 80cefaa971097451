"""Attention received by each key, recomputed tile by tile from q, k and the log-sum-exp; nothing of size W x M held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..tiling import Fold, fold, pad
from ..visibility import visible

BLOCK_Q = 256
BLOCK_K = 512


@dataclass(frozen=True)
class Reduction:
    """How the softmax weights [G, W] that a kv head's key receives become one number.

    Attributes:
        rows: over the W queries. "mean" divides by the number of queries that could see the key.
        group: over the G query heads that share the kv head.
        first: which of the two is reduced first. They commute unless one of them is a maximum.
    """

    rows: Fold = "sum"
    group: Fold = "mean"
    first: Literal["rows", "group"] = "rows"

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("group", self.group)):
            if value not in ("sum", "mean", "max"):
                raise ValueError(f"{name}={value!r}: accepted are 'sum', 'mean' and 'max'")
        if self.first not in ("rows", "group"):
            raise ValueError(f"first={self.first!r}: accepted are 'rows' and 'group'")


def window_scores(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    lse: Float[Array, "B Hq W"] | None = None,
    window: int | None = None,
    reduction: Reduction = Reduction(),
) -> Float[Array, "B H M"]:
    """Softmax weights received by each key from W queries, reduced over queries and group, float32.

    The weight of query r on key c is exp(scale * q_r . k_c - lse_r) where c is visible from r, and 0 elsewhere.

    Args:
        lse: each query's log-sum-exp when it attended. Computed over the keys given here if None.
        reduction: how the [G, W] weights of a key become one score. Keys that no query sees score 0.
    """
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    rows, keys = min(BLOCK_Q, W), min(BLOCK_K, M)
    q = pad(q * scale, -W % rows, axis=2).reshape(B, H, G, -1, D)
    t = pad(q_positions, -W % rows, axis=1, value=-1)
    k = pad(k, -M % keys, axis=2)
    p = pad(k_positions, -M % keys, axis=2, value=-1)
    blocks = t.shape[1] // rows
    newest = jnp.max(t.reshape(B, blocks, rows), axis=(0, 2))
    by_row_first = reduction.first == "rows"

    def logits_of(i: Array, j: Array) -> tuple[Array, Array]:
        """A tile's logits [B, H, G, rows, keys] with -inf where invisible, and what is visible [B, H, rows, keys]."""
        q_tile = jax.lax.dynamic_slice_in_dim(q, i * rows, rows, axis=3).reshape(B, H, G * rows, D)
        k_tile = jax.lax.dynamic_slice_in_dim(k, j * keys, keys, axis=2)
        t_tile = jax.lax.dynamic_slice_in_dim(t, i * rows, rows, axis=1)
        p_tile = jax.lax.dynamic_slice_in_dim(p, j * keys, keys, axis=2)
        seen = visible(t_tile, p_tile, window)
        logits = jnp.einsum("BHRD,BHKD->BHRK", q_tile, k_tile, preferred_element_type=jnp.float32)
        return jnp.where(seen[:, :, None], logits.reshape(B, H, G, rows, keys), -jnp.inf), seen

    def row_lse(i: Array) -> Array:
        def add(j: Array, total: Array) -> Array:
            return jnp.logaddexp(total, jax.nn.logsumexp(logits_of(i, j)[0], axis=-1))

        return jax.lax.fori_loop(0, k.shape[2] // keys, add, jnp.full((B, H, G, rows), -jnp.inf))

    if lse is None:
        lse_blocks = jax.lax.map(row_lse, jnp.arange(blocks))
    else:
        lse_blocks = pad(lse, -W % rows, axis=2).reshape(B, H, G, blocks, rows)
        lse_blocks = jnp.moveaxis(lse_blocks, 3, 0)
    lse_blocks = jnp.where(jnp.isneginf(lse_blocks), jnp.inf, lse_blocks)  # a row that saw nothing weighs nothing

    def key_block(j: Array) -> Array:
        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            score, viewers = carry
            logits, seen = logits_of(i, j)
            weights = jnp.exp(logits - lse_blocks[i][..., None])
            if not by_row_first:
                weights = fold(weights, reduction.group, axis=2)[:, :, None]
            if reduction.rows == "max":
                score = jnp.maximum(score, jnp.max(weights, axis=3))
            else:
                score = score + jnp.sum(weights, axis=3)
            return score, viewers + jnp.sum(seen, axis=2)

        positions = jax.lax.dynamic_slice_in_dim(p, j * keys, keys, axis=2)
        oldest = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max))
        start = jnp.argmax(newest >= oldest)  # the queries before see nothing of this tile
        score = jnp.zeros((B, H, G if by_row_first else 1, keys), jnp.float32)
        score, viewers = jax.lax.fori_loop(start, blocks, add, (score, jnp.zeros((B, H, keys), jnp.int32)))
        if reduction.rows == "mean":
            score = score / jnp.maximum(viewers, 1)[:, :, None]
        return fold(score, reduction.group, axis=2) if by_row_first else score[:, :, 0]

    scores = jax.lax.map(key_block, jnp.arange(k.shape[2] // keys))
    return jnp.moveaxis(scores, 0, 2).reshape(B, H, -1)[..., :M]
