"""The norm of hidden states, and of query and key heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .config import DecoderConfig


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (arXiv 1910.07467).

    The norm is computed in float32. The scale is applied in the dtype of the input, or as 1 + scale in float32.
    """

    def __init__(self, config: DecoderConfig, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike):
        self.epsilon, self.unit_offset = config.norm_epsilon, config.unit_offset_norms
        initial = (jnp.zeros if self.unit_offset else jnp.ones)(shape, dtype)
        self.scale = nnx.Param(initial, out_sharding=axes, eager_sharding=False)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        normed = rms_normed(x, self.epsilon)
        scale = self.scale[...].reshape(-1)
        if self.unit_offset:
            return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * scale


def rms_normed(x: Float[Array, "... C"], epsilon: float) -> Float[Array, "... C"]:
    """Returns vectors divided by their root mean square, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)


def hidden_norm(wanted: bool, config: DecoderConfig, dtype: DTypeLike) -> RMSNorm | None:
    """Returns a norm of hidden states, or None if the family has no such norm."""
    return RMSNorm(config, (config.hidden_size,), ("embed",), dtype) if wanted else None


def maybe(norm: RMSNorm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Returns `norm(x)`, or `x` if the family has no such norm."""
    return x if norm is None else norm(x)
