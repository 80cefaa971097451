"""Segment attention on GPUs (Triton): the programs of a head end where its own segment ends."""

from __future__ import annotations

from functools import partial

from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from ..slot_attention.triton import MOST_LOGIT_ROWS, extra_options
from ..triton.attention import attend
from ..triton.common import check
from .reference import SegmentAttention


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
    interpret: bool = False,
) -> SegmentAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for codes
            whose D is not a power of two; for a GPU that is not NVIDIA's or older than the A100.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H = start.shape[1]
    rows = q.reshape(B, H, -1, D)
    over = partial(attend, scale=scale, window=window, softcap=softcap, bias=bias, interpret=interpret)
    stores_logits = logits and rows.shape[2] <= MOST_LOGIT_ROWS
    extra = extra_options(asked, rows, k, H)
    results = over(rows, k, v, q_positions, k_positions, used, start, logits=stores_logits, **extra)
    assert results.out is not None
    scores = results.scores
    if scores is not None and asked is not None and asked.reduction.group == "mean":
        scores = scores / (Hq // H)
    return SegmentAttention(results.out.reshape(q.shape), results.lse.reshape(B, Hq, W), results.logits, scores)
