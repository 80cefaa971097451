"""Causal attention without a cache, for training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.models import Attend, AttentionLayer, join_sinks
from kvjax.pallas_kernels import capped

from .positions import rotated


def causal(positions: Int[Array, "B N"], block: int = 128, valid: Bool[Array, "B N"] | None = None) -> Attend:
    """Computes plain differentiable causal attention.

    Queries are processed in blocks, each against only the keys that it may see. On a CPU this takes a third of the time
    of masking all pairs.

    Args:
        positions: of the tokens.
        block: the number of queries of a block.
        valid: which tokens are no padding, without gaps in between; None for all. Padding is seen by itself alone.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        q = layer.rope.grown(q, positions)
        rope = layer.rope.row_frequencies(q.shape[-1], jnp.max(positions, axis=1) + 1)
        q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
        B, Hq, N, D = q.shape
        grouped = q.reshape(B, k.shape[1], -1, N, D)
        contexts = []
        for start in range(0, N, block):
            stop = min(start + block, N)
            first = 0 if layer.window is None else max(0, start - layer.window + 1)
            logits = jnp.einsum(
                "BHGND,BHSD->BHGNS",
                grouped[..., start:stop, :],
                k[:, :, first:stop],
                preferred_element_type=jnp.float32,
            )
            distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
            visible = (distance >= 0) & (distance < (layer.window or N))
            if valid is not None:
                # A query that sees nothing would have weights and gradients that are NaN.
                visible = (visible & (valid[:, None, first:stop] | (distance == 0)))[:, None, None]
            logits = jnp.where(visible, capped(logits * layer.scale, layer.softcap), -jnp.inf)
            weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
            context = jnp.einsum("BHGNS,BHSD->BHGND", weights, v[:, :, first:stop]).reshape(B, Hq, -1, D)
            if layer.sinks is not None:
                lse = jax.nn.logsumexp(logits, axis=-1).reshape(B, Hq, -1)
                context, _ = join_sinks(context, lse, layer.sinks)
            contexts.append(context)
        return jnp.concatenate(contexts, axis=2), cache

    return attend
