"""Slot attention on GPUs since Hopper (Pallas, Mosaic GPU): for decode steps, and tried only if it is asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from ..arrays import Fold, check_channels
from ..mosaic_gpu.attention import attend
from ..mosaic_gpu.common import check, products_here
from ..quantized import QuantizedArray
from .asked import Asked
from .reference import SlotAttention
from .rows import extra_options, slot_attention_by


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S D"] | QuantizedArray,
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
        NotImplementedError: for values with another number of channels than keys; for dtypes that differ or are neither
            bfloat16 nor float16; for a D that is no multiple of 32 or above 256; for codes whose scale is that of fewer
            than 32 channels; for an S that is no multiple of 8; for more query rows per kv head than MOST_ROWS, or than
            MOST_SUMS allows; for a GPU before Hopper, and for Blackwell under a JAX before 0.11.
    """
    check_channels(k, v)
    rows, heads = q.shape[1] // k.shape[1] * q.shape[2], k.shape[1]
    check(q, k, v, rows=rows)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    options |= {"received": received, "asked": asked, "extra": extra_options(asked, heads)}
    by = partial(attend, products=products_here(rows, interpret=interpret))
    return slot_attention_by(by, q, k, v, q_positions, k_positions, **options)
