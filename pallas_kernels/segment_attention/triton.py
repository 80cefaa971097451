"""Segment attention on GPUs (Triton): the programs of a head end where its own segment ends."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from ..slot_attention.rows import extra_options
from ..slot_attention.triton import fitting
from ..triton.attention import attend
from ..triton.common import check
from .reference import SegmentAttention
from .rows import segment_attention_by


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
    rows, heads = q.shape[1] // start.shape[1] * q.shape[2], start.shape[1]
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    options |= {"logits": logits, "asked": asked, "extra": extra_options(fitting(asked, rows, k), heads)}
    return segment_attention_by(
        partial(attend, interpret=interpret), q, k, v, q_positions, k_positions, start, used, **options
    )
