"""Slot attention in plain XLA: two batched products over the slots, with a masked softmax between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold, fold
from ..quantized import QuantizedArray, plain
from ..softmax import capped, finite_or_zero
from ..visibility import visible
from ..window_scores.xla import begun, ended
from .asked import Asked
from .reference import SlotAttention


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
) -> SlotAttention:
    """Computes what the reference defines."""
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    k, v = plain(k), plain(v)
    G = Hq // H
    queries = [q] if asked is None else [q, asked.queries]
    rows = jnp.concatenate([(x * scale).reshape(B, H, -1, D) for x in queries], axis=2)
    # Keys come first, and the swap is behind a barrier. XLA would otherwise swap the product's operands, which makes it
    # a quarter slower on a CPU.
    logits = jax.lax.optimization_barrier(jnp.einsum("BHSD,BHRD->BHSR", k, rows, preferred_element_type=jnp.float32))
    logits = capped(logits, softcap)
    if bias is not None:
        logits = logits + bias[..., None]
    logits, others = jnp.split(logits, [G * W], axis=3)
    logits = jnp.swapaxes(logits, 2, 3).reshape(B, H, G, W, S)
    logits = jnp.where(visible(q_positions, k_positions, window)[:, :, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - finite_or_zero(peak))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    lse = (peak + jnp.log(total))[..., 0].reshape(B, Hq, W)
    divisor = jnp.where(total == 0, 1.0, total)
    context = jnp.einsum(
        "BHRS,BHSD->BHRD", exponentials.reshape(B, H, -1, S).astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    context = context / divisor.reshape(B, H, -1, 1)  # D divisions per query instead of S
    received_weights = None
    if received is not None:
        received_weights = fold(exponentials / divisor, received, axis=2).sum(axis=2)
    scores = None
    if asked is not None:
        scores = _reduced(asked, others.reshape(B, H, S, G, -1), k_positions, window)
    return SlotAttention(context.reshape(B, Hq, W, v.shape[-1]).astype(q.dtype), lse, received_weights, scores)


def _reduced(
    asked: Asked, logits: Float[Array, "B H S G X"], k_positions: Int[Array, "B H S"], window: int | None
) -> Float[Array, "B H S"]:
    """The reduced weights of the extra rows, given their logits with all keys."""
    seen = jnp.swapaxes(visible(asked.positions, k_positions, window), 2, 3)
    lse = asked.lse.reshape(logits.shape[0], logits.shape[1], 1, *logits.shape[3:])
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # a query that saw nothing gives no weight
    weights = jnp.exp(jnp.where(seen[:, :, :, None], logits - lse, -jnp.inf))
    return ended(asked.reduction, begun(asked.reduction, weights), jnp.sum(seen, axis=3), k_positions)
