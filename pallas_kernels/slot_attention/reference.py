"""Slot attention in plain XLA: two batched products over the slots, with a masked softmax between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold, fold
from ..quantized import QuantizedArray, plain
from ..softcap import capped
from ..softmax import finite_or_zero
from ..visibility import visible
from ..window_scores.reference import Reduction


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asked:
    """X extra query rows from earlier steps, whose attention weights on the current keys are wanted.

    Attributes:
        queries: as they were multiplied with keys in their own step, rotated if keys are.
        lse: the float32 log-sum-exp of each query in its own step. It normalises the weights.
        positions: of the queries, in any order; -1 for a row to leave out.
        reduction: of the [G, X] weights of a key to one number.
    """

    queries: Float[Array, "B Hq X D"]
    lse: Float[Array, "B Hq X"]
    positions: Int[Array, "B X"]
    reduction: Reduction = field(metadata={"static": True})

    def scores(
        self, by: Callable[..., Array], k: Float[Array, "B H M D"], k_positions: Int[Array, "B H M"], **options: Any
    ) -> Float[Array, "B H M"]:
        """Returns the reduced weights, computed in a pass over the keys of its own.

        Args:
            by: an implementation of `window_scores`.
            options: further arguments of `window_scores`.
        """
        lse, reduction = self.lse, self.reduction
        return by(self.queries, k, self.positions, k_positions, lse=lse, reduction=reduction, **options)

    def reduced(
        self, logits: Float[Array, "B H S G X"], k_positions: Int[Array, "B H S"], window: int | None
    ) -> Float[Array, "B H S"]:
        """Returns the reduced weights, given the logits of the extra rows with all keys."""
        seen = jnp.swapaxes(visible(self.positions, k_positions, window), 2, 3)
        lse = self.lse.reshape(logits.shape[0], logits.shape[1], 1, *logits.shape[3:])
        lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # a query that saw nothing gives no weight
        weights = jnp.exp(jnp.where(seen[:, :, :, None], logits - lse, -jnp.inf))
        return self.reduction.ended(self.reduction.begun(weights), jnp.sum(seen, axis=3), k_positions)


class SlotAttention(NamedTuple):
    """The results of `slot_attention`.

    Attributes:
        context: in the queries' dtype; 0 where nothing is visible.
        lse: float32 log-sum-exp of the scaled logits; -inf where nothing is visible.
        received: float32, the attention that each slot received from the W query rows; None unless requested.
        scores: float32, the attention that each slot received from the extra query rows; None if there were none.
    """

    context: Float[Array, "B Hq W Dv"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B H S"] | None = None
    scores: Float[Array, "B H S"] | None = None


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
    """Attention of W query rows over slots in any order; W is small.

    Args:
        v: with D channels, or another number: of pruned keys. The kernels for TPUs and of Mosaic GPU serve D alone.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each slot.
        received: also return the attention that each slot received: the weights, reduced in this way over the query
            heads of a kv head and then summed over the W rows.
        asked: extra query rows. Also return their reduced weights on the slots, as `window_scores` defines them.
            They are computed in the same pass over the keys.
    """
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
        scores = asked.reduced(others.reshape(B, H, S, G, -1), k_positions, window)
    return SlotAttention(context.reshape(B, Hq, W, v.shape[-1]).astype(q.dtype), lse, received_weights, scores)
