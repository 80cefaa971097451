"""Slot attention on GPUs (Triton): one pass over keys and values, which ends at the last occupied slot."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from ..arrays import Fold
from ..quantized import QuantizedArray
from ..triton.attention import attend, attend_blocks
from ..triton.common import check
from .asked import Asked
from .reference import SlotAttention
from .rows import extra_options, slot_attention_by


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
    interpret: bool = False,
) -> SlotAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for codes
            whose D is not a power of two; for a GPU that is not NVIDIA's or older than the A100.
    """
    check(q, k, v, quantized=True)
    rows, heads = q.shape[1] // k.shape[1] * q.shape[2], k.shape[1]
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    options |= {"received": received, "asked": asked, "extra": extra_options(fitting(asked, rows, k), heads)}
    return slot_attention_by(partial(attend, interpret=interpret), q, k, v, q_positions, k_positions, **options)


def fitting(asked: Asked | None, rows: int, k: Array | QuantizedArray) -> Asked | None:
    """The extra query rows, if one pass can score them: all attending rows must fit into one block.

    Args:
        rows: attending rows per kv head.
    """
    return None if asked is None or rows > attend_blocks(rows, k, extra=1).rows else asked
