"""Decode attention in plain XLA: two batched products over the slots with a masked softmax between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..tiling import Fold, fold
from ..visibility import visible


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
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"], Float[Array, "B H S"] | None]:
    """Attention of W (few) query rows over slots in any order.

    Args:
        bias: float32, added to the scaled logits of each slot.
        received: also return what each slot received: the weights reduced so over a kv head's query group, then summed
            over the W rows.

    Returns:
        The context in q's dtype, the float32 log-sum-exp of the scaled logits (-inf where nothing is visible, and the
        context then 0), and `received` in float32 or None.
    """
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    k, v = plain(k), plain(v)
    rows = (q * scale).reshape(B, H, -1, D)
    # Keys first, and turned behind a barrier: otherwise XLA turns the product, which a CPU computes a quarter slower.
    logits = jax.lax.optimization_barrier(jnp.einsum("BHSD,BHRD->BHSR", k, rows, preferred_element_type=jnp.float32))
    logits = jnp.swapaxes(logits, 2, 3).reshape(B, H, -1, W, S)
    if bias is not None:
        logits = logits + bias[:, :, None, None]
    logits = jnp.where(visible(q_positions, k_positions, window)[:, :, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    lse = (peak + jnp.log(total))[..., 0].reshape(B, Hq, W)
    divisor = jnp.where(total == 0, 1.0, total)
    context = jnp.einsum(
        "BHRS,BHSD->BHRD", exponentials.reshape(B, H, -1, S).astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    context = context / divisor.reshape(B, H, -1, 1)  # of S numbers a query, D are left to divide
    received_weights = None
    if received is not None:
        received_weights = fold(exponentials / divisor, received, axis=2).sum(axis=2)
    return context.reshape(B, Hq, W, D).astype(q.dtype), lse, received_weights
