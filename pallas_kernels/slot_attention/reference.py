"""Decode attention in plain XLA: two batched products over the slots with a masked softmax between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..tiling import Fold, fold
from ..visibility import visible
from ..window_scores.reference import Reduction, window_scores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asked:
    """Queries that have attended before, and are asked what they give to each key now.

    Attributes:
        queries: E of each query head, as they met the keys.
        lse: the log-sum-exp with which each of them attended.
        positions: of the queries, in any order; -1 for one that is not asked.
        reduction: of the [G, E] weights that a key receives to one number.
    """

    queries: Float[Array, "B Hq E D"]
    lse: Float[Array, "B Hq E"]
    positions: Int[Array, "B E"]
    reduction: Reduction = field(metadata={"static": True})

    def scores(
        self, by: Callable[..., Array], k: Float[Array, "B H M D"], k_positions: Int[Array, "B H M"], **options: Any
    ) -> Float[Array, "B H M"]:
        """What `by`, a `window_scores`, finds that they give to these keys."""
        lse, reduction = self.lse, self.reduction
        return by(self.queries, k, self.positions, k_positions, lse=lse, reduction=reduction, **options)


class SlotAttention(NamedTuple):
    """What queries found in slots.

    Attributes:
        context: in the queries' dtype; 0 where nothing is visible.
        lse: log-sum-exp of the scaled logits, float32; -inf where nothing is visible.
        received: what each slot received from these queries, float32, if that was wished for.
        scores: what each slot received from those that were asked, float32, if any were.
    """

    context: Float[Array, "B Hq W D"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B H S"] | None = None
    scores: Float[Array, "B H S"] | None = None


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
    asked: Asked | None = None,
) -> SlotAttention:
    """Attention of W (few) query rows over slots in any order.

    Args:
        bias: float32, added to the scaled logits of each slot.
        received: also return what each slot received: the weights reduced so over a kv head's query group, then summed
            over the W rows.
        asked: also return what these queries give to each slot, as `window_scores` has it with their log-sum-exp.
            Kernels find it in the same pass over the keys.
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
    scores = None
    if asked is not None:
        scores = asked.scores(window_scores, k, k_positions, scale=scale, window=window, bias=bias)
    return SlotAttention(context.reshape(B, Hq, W, D).astype(q.dtype), lse, received_weights, scores)
