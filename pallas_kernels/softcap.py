"""The soft cap of attention logits (Gemma 2, arXiv 2408.00118), which all kernels and references share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def capped(logits: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """Returns softcap * tanh(logits / softcap): the scaled logits before any bias, in (-softcap, softcap)."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
