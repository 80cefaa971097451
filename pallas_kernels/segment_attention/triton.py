"""Attention over segments of a pool on GPUs, by Triton: a head's programs end where its own segment does."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray
from ..triton_attention import attend, check


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
    """As the reference.

    Raises:
        NotImplementedError: for mixed or other dtypes than float32, bfloat16 and float16, for more than 256 channels a
            head, and in 8 or 4 bits for numbers of channels that are no power of two.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    rows = q.reshape(B, start.shape[1], -1, D)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "interpret": interpret}
    found = attend(rows, k, v, q_positions, k_positions, used, start, **options)
    assert found.out is not None
    return found.out.reshape(q.shape), found.lse.reshape(B, Hq, W)
