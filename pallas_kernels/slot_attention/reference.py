"""The definition of `slot_attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold
from ..definition import context_of, logits_of, weights_of
from ..quantized import QuantizedArray, plain
from ..window_scores.reference import FOLDS, window_scores
from .asked import Asked


class SlotAttention(NamedTuple):
    """The results of `slot_attention`.

    Attributes:
        context: in the queries' dtype; 0 where nothing is visible.
        lse: float32 log-sum-exp of the scaled logits; -inf where nothing is visible.
        received: float32, the attention that each slot received from the W query rows; None unless requested.
        scores: float32, the attention that each slot received from the extra query rows; None if there were none.
    """

    context: Float[Array, "B Hq W Dv"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B H S"] | None = None
    scores: Float[Array, "B H S"] | None = None


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S Dv"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H S"] | None = None,
    received: Fold | None = None,
    asked: Asked | None = None,
) -> SlotAttention:
    """Attention of W query rows over slots in any order; W is small.

    Args:
        v: with D channels, or another number: of pruned keys. The kernels for TPUs and of Mosaic GPU serve D alone.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each slot.
        received: also return the attention that each slot received: the weights, reduced in this way over the query
            heads of a kv head and then summed over the W rows.
        asked: extra query rows. Also return their reduced weights on the slots, as `window_scores` defines them.
            They are computed in the same pass over the keys.
    """
    k, v = plain(k), plain(v)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    weights, lse = weights_of(logits_of(q, k, q_positions, k_positions, **options)[0])
    return SlotAttention(
        context_of(weights, v).astype(q.dtype),
        lse,
        None if received is None else jnp.sum(FOLDS[received](weights, axis=2), axis=2),
        None if asked is None else asked.scores(window_scores, k, k_positions, **options),
    )
