"""The one place where queries meet keys: attention functions for the decoder, and the choice of kernels behind them."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from kvjax.models import Attend, AttentionLayer, rotate


def causal(positions: Int[Array, "B N"]) -> Attend:
    """Plain differentiable causal attention over whole sequences without padding, as training needs it. No cache."""

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        frequencies = layer.rope.frequencies(q.shape[-1])
        q, k = (rotate(x, positions[:, None], frequencies) for x in (q, k))
        context = jax.nn.dot_product_attention(
            *(x.swapaxes(1, 2) for x in (q, k, v)),
            scale=layer.scale,
            is_causal=True,
            local_window_size=None if layer.window is None else (layer.window - 1, 0),
        )
        return context.swapaxes(1, 2), cache

    return attend
