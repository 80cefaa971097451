"""Decode attention on GPUs, by Triton: one pass over keys and values, to the last occupied slot and no further."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..tiling import Fold, after_last, fold
from ..triton_attention import attend, check
from ..visibility import visible
from ..window_scores import Reduction, window_scores

LOGITS = 64  # rows a kv head for which they are kept to say what slots received; others are computed again


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B H S"] | None = None,
    received: Fold | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"], Float[Array, "B H S"] | None]:
    """As the reference.

    Raises:
        NotImplementedError: for mixed or other dtypes than float32, bfloat16 and float16, for more than 256 channels a
            head, and in 8 or 4 bits for numbers of channels that are no power of two.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias}
    bound = after_last(k_positions >= 0)
    keeps = received is not None and Hq // H * W <= LOGITS
    rows = q.reshape(B, H, -1, D)
    found = attend(rows, k, v, q_positions, k_positions, bound, logits=keeps, interpret=interpret, **options)
    assert found.out is not None
    out, lse = found.out.reshape(q.shape), found.lse.reshape(B, Hq, W)
    if received is None:
        return out, lse, None
    if found.logits is None:
        reduction = Reduction(rows="sum", group=received, first="group")
        return out, lse, window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    finite = jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(B, H, -1, W, 1)
    weights = jnp.exp(found.logits.reshape(B, H, -1, W, S) - finite)
    # What was not looked at is undefined, and not visible either.
    weights = jnp.where(visible(q_positions, k_positions, window)[:, :, None], weights, 0.0)
    return out, lse, fold(weights, received, axis=2).sum(axis=2)
