"""Segment attention by kernels of GPUs, which attend with the query rows of a kv head together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from ..slot_attention.rows import MOST_LOGIT_ROWS
from .reference import SegmentAttention


def segment_attention_by(
    attend: Callable[..., Any],
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    start: Int[Array, "B H"],
    used: Int[Array, "B H"],
    *,
    logits: bool,
    asked: Asked | None,
    extra: Mapping[str, Any],
    **options: Any,
) -> SegmentAttention:
    """Computes what the reference defines.

    Args:
        attend: computes the context, the log-sum-exps, the logits and the scores of rows [B, H, G W, D].
        extra: its arguments for the rows of `asked`; none if they need a pass of their own.
        options: scale, window, softcap and bias.
    """
    (B, Hq, W, D), H = q.shape, start.shape[1]
    rows = q.reshape(B, H, -1, D)
    stores_logits = logits and rows.shape[2] <= MOST_LOGIT_ROWS
    found = attend(rows, k, v, q_positions, k_positions, used, start, logits=stores_logits, **extra, **options)
    scores = found.scores
    if scores is not None and asked is not None and asked.reduction.group == "mean":
        scores = scores / (Hq // H)
    return SegmentAttention(found.out.reshape(q.shape), found.lse.reshape(B, Hq, W), found.logits, scores)
