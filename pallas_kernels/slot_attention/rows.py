"""Slot attention by kernels of GPUs, which attend with the query rows of a kv head together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold, fold
from ..quantized import QuantizedArray, plain
from ..softmax import finite_or_zero
from ..visibility import visible
from ..window_scores import Reduction, window_scores
from .asked import Asked
from .reference import SlotAttention

MOST_LOGIT_ROWS = 64  # query rows per kv head for which logits are stored; with more, `window_scores` recomputes them


def slot_attention_by(
    attend: Callable[..., Any],
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S Dv"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    received: Fold | None,
    asked: Asked | None,
    extra: Mapping[str, Any],
    **options: Any,
) -> SlotAttention:
    """Computes what the reference defines.

    Args:
        attend: computes the context, the log-sum-exps, the logits and the scores of rows [B, H, G W, D].
        extra: its arguments for the rows of `asked`; none if they need a pass of their own.
        options: scale, window, softcap and bias.
    """
    (B, Hq, W, D), (H, S) = q.shape, k.shape[1:3]
    stores_logits = received is not None and Hq // H * W <= MOST_LOGIT_ROWS
    results = attend(q.reshape(B, H, -1, D), k, v, q_positions, k_positions, logits=stores_logits, **extra, **options)
    lse = results.lse.reshape(B, Hq, W)
    weights = scores = None
    if results.logits is not None and received is not None:
        finite = finite_or_zero(lse).reshape(B, H, -1, W, 1)
        weights = jnp.exp(results.logits.reshape(B, H, -1, W, S) - finite)
        # Logits of slots that were not read are undefined; no query sees these slots.
        weights = jnp.where(visible(q_positions, k_positions, options["window"])[:, :, None], weights, 0.0)
        weights = fold(weights, received, axis=2).sum(axis=2)
    elif received is not None:
        reduction = Reduction(rows="sum", group=received, first="group")
        weights = window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    if results.scores is not None and asked is not None:
        scored = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        scores = jnp.where(scored, results.scores, 0.0)
        if asked.reduction.group == "mean":
            scores = scores / (Hq // H)
    elif asked is not None:
        scores = asked.scores(window_scores, plain(k), k_positions, **options)
    return SlotAttention(results.out.reshape(B, Hq, W, -1), lse, weights, scores)


def extra_options(asked: Asked | None, heads: int) -> dict[str, Any]:
    """The arguments of `attend` for extra query rows; none if there are no rows that one pass can score."""
    extra = None if asked is None else asked.tiles(heads)
    return {} if extra is None else {"extra": extra[0], "extra_reduction": extra[1]}
