"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split layout as in Hugging Face checkpoints.

A rotation is a base, the share of each head's channels that rotate, and perhaps a scaling for contexts longer than the
model was first trained for. Scalings have the names and the fields of Hugging Face configs. Those of `dynamic` and
`longrope` depend on the length of a text: see `Rope.row_frequencies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .fields import UnsupportedModelError


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): all positions are divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    attention_factor: ClassVar[float] = 1.0
    factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones kept, a ramp between."""

    rope_type: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_max_position_embeddings / wavelengths - low) / (high - low)
        ramp = np.clip(smooth, 0.0, 1.0)
        return frequencies * ((1.0 - ramp) / self.factor + ramp)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): channels that turn less than `beta_slow` times in the original context are stretched by
    `factor`, those that turn more than `beta_fast` times are kept, with a ramp between; q and k grow by
    `attention_factor`. `truncate` rounds the ends of the ramp to whole channels."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        channels = 2 * len(frequencies)

        def pair_that_turns(times: float) -> float:
            context = self.original_max_position_embeddings / (2 * math.pi * times)
            return channels * math.log(context) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        width = high - low or 0.001
        stretched = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / width, 0, 1)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: in a text longer than the model was trained for the base grows with its length."""

    rope_type: ClassVar[str] = "dynamic"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    max_position_embeddings: int

    def by_length(self, frequencies: np.ndarray, lengths: Int[Array, "B"]) -> Float[Array, "B R/2"]:
        channels = 2 * len(frequencies)
        over = jnp.maximum(lengths / self.max_position_embeddings, 1.0)
        growth = self.factor * over - (self.factor - 1)  # of base ** ((R - 2) / R)
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels - 2)
        return jnp.asarray(frequencies) / growth[:, None] ** exponents


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each frequency is divided by a factor of its own, of one list for texts of up to the
    original context and of another for longer ones; q and k grow by `attention_factor`, whatever the length."""

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int

    def by_length(self, frequencies: np.ndarray, lengths: Int[Array, "B"]) -> Float[Array, "B R/2"]:
        short, long = (frequencies / np.array(x, np.float32) for x in (self.short_factor, self.long_factor))
        return jnp.where((lengths > self.original_max_position_embeddings)[:, None], long, short)

    def __str__(self) -> str:
        trained, factor = self.original_max_position_embeddings, self.attention_factor
        return f"LongRopeScaling(original_max_position_embeddings={trained}, attention_factor={factor:.4g})"


LengthScaling: TypeAlias = DynamicScaling | LongRopeScaling
Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LengthScaling


@dataclass(frozen=True)
class Rope:
    """A rotation: the base `theta`, how its frequencies are scaled, and the share of a head's channels that rotate.

    Of a head's D channels the first R = int(D * partial_rotary_factor) rotate and the others pass.
    """

    theta: float
    scaling: Scaling | None = None
    partial_rotary_factor: float = 1.0

    @property
    def attention_factor(self) -> float:
        """What rotated channels of q and k are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def depends_on_length(self) -> bool:
        """Whether a text's length decides its frequencies."""
        return isinstance(self.scaling, LengthScaling)

    def channels(self, head_dim: int) -> int:
        """How many channels of a head rotate, R."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raises UnsupportedModelError if heads of this size cannot be rotated so."""
        channels, scaling = self.channels(head_dim), self.scaling
        of = "" if self.partial_rotary_factor == 1 else f" with partial_rotary_factor={self.partial_rotary_factor}"
        if channels < 2 or channels % 2:
            raise UnsupportedModelError(
                f"head_dim={head_dim}{of} gives {channels} channels to rotate; accepted: an even number, as RoPE "
                "rotates pairs"
            )
        if isinstance(scaling, DynamicScaling) and channels == 2:
            raise UnsupportedModelError(f"head_dim={head_dim}{of} is too small for rope type 'dynamic'; accepted: >= 4")
        if isinstance(scaling, LongRopeScaling):
            for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
                if len(factors) != channels // 2:
                    raise UnsupportedModelError(
                        f"config field {name} has {len(factors)} numbers; accepted: {channels // 2}, one for each "
                        f"pair of channels of head_dim={head_dim}{of}"
                    )

    def frequencies(self, head_dim: int) -> Float[np.ndarray, "R/2"]:
        """Radians per position of each channel pair, float32. Raises ValueError if they depend on a text's length."""
        frequencies = self._unscaled(head_dim)
        if self.scaling is None:
            return frequencies
        if isinstance(self.scaling, LengthScaling):
            raise ValueError(f"frequencies of rope type {self.scaling.rope_type!r} need the lengths of the texts")
        return self.scaling(frequencies, self.theta).astype(np.float32)

    def row_frequencies(self, head_dim: int, lengths: Int[Array, "B"]) -> Float[Array, "B R/2"] | None:
        """The same for texts of these lengths, where frequencies depend on them; None where they do not."""
        if isinstance(self.scaling, LengthScaling):
            return self.scaling.by_length(self._unscaled(head_dim), lengths)
        return None

    def _unscaled(self, head_dim: int) -> Float[np.ndarray, "R/2"]:
        channels = self.channels(head_dim)
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
        return (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)

    def __str__(self) -> str:
        parts = [f"base {self.theta:,.0f}"]
        if self.partial_rotary_factor != 1:
            parts.append(f"{self.partial_rotary_factor:g} of the channels")
        if self.scaling is not None:
            parts.append(str(self.scaling))
        return ", ".join(parts)


def rotate(
    x: Float[Array, "B H N D"],
    positions: Int[Array, "B #H N"],
    frequencies: Float[np.ndarray | Array, "R/2"] | Float[Array, "B R/2"],
    factor: float = 1.0,
) -> Float[Array, "B H N D"]:
    """Turns channel pair (i, i + R/2) of the vector at position p by p * frequencies[i], and scales it by `factor`.

    Channels from R on pass as they are. Computed in float32.
    """
    size = 2 * frequencies.shape[-1]
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None, None]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    turned = jax.lax.platform_dependent(x[..., :size], cos, sin, tpu=turned_by_product, default=turned_by_halves)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def turned_by_halves(
    x: Float[Array, "B H N R"], cos: Float[Array, "B #H N R/2"], sin: Float[Array, "B #H N R/2"]
) -> Float[Array, "B H N R"]:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def turned_by_product(
    x: Float[Array, "B H N R"], cos: Float[Array, "B #H N R/2"], sin: Float[Array, "B #H N R/2"]
) -> Float[Array, "B H N R"]:
    """The same for TPUs, where half of the channels fill half of a register's lanes, and each half would be written.

    Channels change places in a product with ones, which is exact.
    """
    half = x.shape[-1] // 2
    partner = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    other = jnp.matmul(x, partner, precision=jax.lax.Precision.HIGHEST).astype(jnp.float32)
    cos, sin = (jnp.concatenate([y, y], axis=-1) for y in (cos, sin))
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)
