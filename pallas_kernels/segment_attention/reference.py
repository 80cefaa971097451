"""The definition of `segment_attention`: slot attention in which each head sees the rows of its own segment alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..definition import logits_of
from ..quantized import QuantizedArray, plain
from ..slot_attention.asked import Asked
from ..slot_attention.reference import slot_attention


class SegmentAttention(NamedTuple):
    """The results of `segment_attention`.

    Attributes:
        context: in the queries' dtype; 0 where nothing is visible.
        lse: float32 log-sum-exp of the scaled logits; -inf where nothing is visible.
        logits: float32, the scaled and biased logits of the R = G W query rows that a row of the pool met; -inf where
            it is not visible, undefined in rows that no segment uses, and in batch rows without queries. None unless
            requested, or if a kernel would read the keys again for it.
        scores: float32, the attention that each row of the pool received from the extra query rows; undefined in rows
            that no segment uses, and in batch rows without any queries. None in the same cases.
    """

    context: Float[Array, "B Hq W D"]
    lse: Float[Array, "B Hq W"]
    logits: Float[Array, "B P R T"] | None = None
    scores: Float[Array, "B P T"] | None = None


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
    """Attention of W query rows over the segments of a pool; W is small.

    A lane of the pool holds the segments of J = H / P consecutive kv heads.

    Args:
        k_positions: -1 for empty rows of the pool.
        start: the first row of a head's segment in its lane, a multiple of PAGE.
        used: the number of rows, from `start` on, that may hold entries. No row after them is read, except in the rest
            of the last tile.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each row of the pool.
        logits: whether to return the logits.
        asked: extra query rows. Also return their reduced weights on the rows of the pool, as `window_scores` defines
            them.
    """
    (B, P, T), H = k_positions.shape, start.shape[1]
    row = jnp.arange(T)
    own = (start[..., None] <= row) & (row < (start + used)[..., None])

    def of_heads(pool: Array, empty: int = 0) -> Array:
        """A lane for each kv head, empty outside of its segment."""
        lanes = jnp.repeat(pool, H // P, axis=1)
        return jnp.where(own.reshape(*own.shape, *(1,) * (pool.ndim - 3)), lanes, empty)

    keys, values, positions = of_heads(plain(k)), of_heads(plain(v)), of_heads(k_positions, empty=-1)
    biases = None if bias is None else of_heads(bias)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": biases}
    context, lse, _, scores = slot_attention(q, keys, values, q_positions, positions, asked=asked, **options)
    met, _ = logits_of(q, keys, q_positions, positions, **options)
    # A row of a pool belongs to one head. The others of its lane have logits of -inf and scores of 0 there.
    return SegmentAttention(
        context,
        lse,
        jnp.max(met.reshape(B, P, H // P, -1, T), axis=2) if logits else None,
        None if scores is None else jnp.sum(scores.reshape(B, P, H // P, T), axis=2),
    )
