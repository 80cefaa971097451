"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split layout as in Hugging Face checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_frequency_factor, self.high_frequency_factor
        smooth = (self.original_max_positions / wavelengths - low) / (high - low)
        ramp = np.clip(smooth, 0.0, 1.0)
        return frequencies * ((1.0 - ramp) / self.factor + ramp)


@dataclass(frozen=True)
class Rope:
    """A rotation: the base `theta` and how its frequencies are scaled for longer contexts."""

    theta: float
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> Float[np.ndarray, "D/2"]:
        """Radians per position of each channel pair, float32."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        return frequencies if self.scaling is None else self.scaling(frequencies).astype(np.float32)


def rotate(
    x: Float[Array, "B H N D"], positions: Int[Array, "B #H N"], frequencies: Float[np.ndarray, "D/2"]
) -> Float[Array, "B H N D"]:
    """Turns channel pair (i, i + D/2) of the vector at position p by p * frequencies[i]. Computed in float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
