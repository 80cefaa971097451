"""Segment attention on GPUs since Hopper (Pallas, Mosaic GPU): tried only if it is asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from ..mosaic_gpu.attention import attend
from ..mosaic_gpu.common import check, products_here
from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from ..slot_attention.rows import extra_options
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
        NotImplementedError: as `slot_attention` of this backend does.
    """
    rows, heads = q.shape[1] // start.shape[1] * q.shape[2], start.shape[1]
    check(q, k, v, rows=rows)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    options |= {"logits": logits, "asked": asked, "extra": extra_options(asked, heads)}
    by = partial(attend, products=products_here(rows, interpret=interpret))
    return segment_attention_by(by, q, k, v, q_positions, k_positions, start, used, **options)
