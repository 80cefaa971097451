"""Segment attention on GPUs (Triton): the programs of a head end where its own segment ends."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray
from ..triton import check
from ..triton_attention import attend


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
    bias: Float[Array, "B P T"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for codes
            whose D is not a power of two; for a GPU that is not NVIDIA's or older than the A100.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    rows = q.reshape(B, start.shape[1], -1, D)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "interpret": interpret}
    results = attend(rows, k, v, q_positions, k_positions, used, start, **options)
    assert results.out is not None
    return results.out.reshape(q.shape), results.lse.reshape(B, Hq, W)
