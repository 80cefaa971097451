"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

A `Rope` consists of a base, the fraction of each head's channels that rotate, and an optional scaling for contexts
longer than the model was first trained for. The scalings have the names and fields of Hugging Face configs. The
frequencies of `dynamic` and `longrope` depend on the length of each row's prompt: see `Rope.row_frequencies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .fields import UnsupportedModelError


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): divides all positions by `factor`."""

    rope_type: ClassVar[str] = "linear"
    attention_factor: ClassVar[float] = 1.0
    factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies; `theta` is the base."""
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1, by wavelength relative to the original context length.

    Wavelengths above original / `low_freq_factor` are multiplied by `factor`, those below original /
    `high_freq_factor` are unchanged, and those between are interpolated.
    """

    rope_type: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies; `theta` is the base."""
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_max_position_embeddings / wavelengths - low) / (high - low)
        ramp = np.clip(smooth, 0.0, 1.0)
        return frequencies * ((1.0 - ramp) / self.factor + ramp)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), by the number of turns of a channel pair within the original context.

    The wavelengths of pairs with fewer than `beta_slow` turns are multiplied by `factor`, those of pairs with more than
    `beta_fast` turns are unchanged, and a linear ramp lies between. q and k are multiplied by `attention_factor`.
    `truncate` rounds the ends of the ramp to whole channel pairs. `Rope.grown` has `llama_4_scaling_beta`.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int
    llama_4_scaling_beta: float = 0.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies; `theta` is the base."""
        channels = 2 * len(frequencies)

        def pair_with_turns(turns: float) -> float:
            inverse_frequency = self.original_max_position_embeddings / (2 * math.pi * turns)
            return channels * math.log(inverse_frequency) / (2 * math.log(theta))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        width = high - low or 0.001
        stretched = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / width, 0, 1)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)


@dataclass(frozen=True)
class ProportionalScaling:
    """The RoPE of Gemma 4: only the pairs of the first channels rotate, with the frequencies of a whole head.

    With `Rope.partial_rotary_factor` instead, the frequencies are those of a smaller head, and a pair consists of
    channels of that head. Here the first channel of a pair is in the first half of all channels.

    Attributes:
        factor: what the frequencies are divided by.
        partial_rotary_factor: the fraction of the pairs that rotate, in (0, 1].
    """

    rope_type: ClassVar[str] = "proportional"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    partial_rotary_factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, 0 for pairs that do not rotate; `theta` is the base."""
        rotated = int(self.partial_rotary_factor * 2 * len(frequencies) // 2)
        return np.where(np.arange(len(frequencies)) < rotated, frequencies / np.float32(self.factor), 0)


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the length of a prompt that exceeds `max_position_embeddings`."""

    rope_type: ClassVar[str] = "dynamic"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    max_position_embeddings: int

    def by_length(self, frequencies: np.ndarray, lengths: Int[Array, "B"]) -> Float[Array, "B C/2"]:
        """Returns the scaled frequencies of rows with prompts of these lengths."""
        channels = 2 * len(frequencies)
        over = jnp.maximum(lengths / self.max_position_embeddings, 1.0)
        growth = self.factor * over - (self.factor - 1)  # the factor on base ** ((C - 2) / C)
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels - 2)
        return jnp.asarray(frequencies) / growth[:, None] ** exponents


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): divides each frequency by its own factor.

    Prompts up to the original context length use `short_factor`, longer ones `long_factor`. q and k are multiplied by
    `attention_factor` at every length.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int

    def by_length(self, frequencies: np.ndarray, lengths: Int[Array, "B"]) -> Float[Array, "B C/2"]:
        """Returns the scaled frequencies of rows with prompts of these lengths."""
        short, long = (frequencies / np.array(x, np.float32) for x in (self.short_factor, self.long_factor))
        return jnp.where((lengths > self.original_max_position_embeddings)[:, None], long, short)

    def __str__(self) -> str:
        trained, factor = self.original_max_position_embeddings, self.attention_factor
        return f"LongRopeScaling(original_max_position_embeddings={trained}, attention_factor={factor:.4g})"


LengthScaling: TypeAlias = DynamicScaling | LongRopeScaling
Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | LengthScaling


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding. The first C = int(D * partial_rotary_factor) channels of a head rotate.

    Attributes:
        theta: the base of the frequencies theta ** (-2 i / C), for channel pairs i = 0 .. C / 2 - 1.
        scaling: how the frequencies are scaled for long contexts; None for no scaling.
        partial_rotary_factor: the fraction of a head's channels that rotate, in (0, 1]; 0 in NO_ROPE alone.
    """

    theta: float
    scaling: Scaling | None = None
    partial_rotary_factor: float = 1.0

    @property
    def attention_factor(self) -> float:
        """The factor that multiplies the rotated channels of q and k."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def depends_on_length(self) -> bool:
        """Returns whether the frequencies of a row depend on the length of its prompt."""
        return isinstance(self.scaling, LengthScaling)

    def frequencies_of(
        self, head_dim: int, rows: Float[Array, "B C/2"] | None
    ) -> Float[np.ndarray, "C/2"] | Float[Array, "B C/2"]:
        """Returns `rows`, those of the model's prompts, if the frequencies depend on the length, else `frequencies`."""
        return rows if rows is not None and self.depends_on_length else self.frequencies(head_dim)

    def grown(self, q: Float[Array, "B Hq N D"], positions: Int[Array, "B N"]) -> Float[Array, "B Hq N D"]:
        """Multiplies the query at position p by 1 + b ln(1 + floor(p / n)), for texts beyond the original n tokens.

        b is `YarnScaling.llama_4_scaling_beta`, and 0 for all other RoPE: the queries are then returned as they are.
        """
        scaling = self.scaling
        if not isinstance(scaling, YarnScaling) or scaling.llama_4_scaling_beta == 0:
            return q
        times = jnp.maximum(positions, 0) // scaling.original_max_position_embeddings
        factor = 1 + scaling.llama_4_scaling_beta * jnp.log1p(times.astype(jnp.float32))
        return q * factor[:, None, :, None].astype(q.dtype)

    def channels(self, head_dim: int) -> int:
        """The number of channels of a head that rotate, C."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raises UnsupportedModelError if this RoPE cannot rotate heads of size `head_dim`."""
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
                        f"config field {name} has {len(factors)} numbers; accepted: {channels // 2}, one per "
                        f"pair of channels of head_dim={head_dim}{of}"
                    )

    def frequencies(self, head_dim: int) -> Float[np.ndarray, "C/2"]:
        """Returns the rotation of each channel pair in radians per position, in float32.

        It is the same array for equal arguments, so that all layers of a program share one constant.

        Raises:
            ValueError: the frequencies depend on the length of a prompt; use `row_frequencies`.
        """
        if isinstance(self.scaling, LengthScaling):
            raise ValueError(
                f"the frequencies of rope type {self.scaling.rope_type!r} need the lengths of the prompts: "
                "call row_frequencies(head_dim, lengths)"
            )
        return _frequencies(self, head_dim)

    def row_frequencies(self, head_dim: int, lengths: Int[Array, "B"]) -> Float[Array, "B C/2"] | None:
        """Returns the frequencies of rows with prompts of these lengths; None if they do not depend on the length."""
        if isinstance(self.scaling, LengthScaling):
            return self.scaling.by_length(self._unscaled(head_dim), lengths)
        return None

    def _unscaled(self, head_dim: int) -> Float[np.ndarray, "C/2"]:
        channels = self.channels(head_dim)
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
        return (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)

    def __str__(self) -> str:
        if self.partial_rotary_factor == 0:
            return "none"
        parts = [f"base {self.theta:,.0f}"]
        if self.partial_rotary_factor != 1:
            parts.append(f"{self.partial_rotary_factor:g} of the channels")
        if self.scaling is not None:
            parts.append(str(self.scaling))
        return ", ".join(parts)


NO_ROPE = Rope(theta=1.0, partial_rotary_factor=0.0)  # of a layer that does not know positions


@lru_cache(maxsize=64)
def _frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "C/2"]:
    """Computes what `rope.frequencies` returns: an array that is not writable, because callers share it."""
    frequencies = rope._unscaled(head_dim)
    if rope.scaling is not None and not isinstance(rope.scaling, LengthScaling):
        frequencies = rope.scaling(frequencies, rope.theta).astype(np.float32)
    frequencies.setflags(write=False)
    return frequencies


@partial(jax.jit, static_argnames="factor")  # a model's layers share the trace
def rotate(
    x: Float[Array, "B H N D"],
    positions: Int[Array, "B #H N"],
    frequencies: Float[np.ndarray | Array, "C/2"] | Float[Array, "B C/2"],
    factor: float = 1.0,
) -> Float[Array, "B H N D"]:
    """Rotates channel pair (i, i + C/2) of the vector at position p by p * frequencies[i], and scales it by `factor`.

    Channels from C on are unchanged. The computation is in float32 and the result has the dtype of `x`.

    Args:
        x: the vectors to rotate.
        positions: the position of each token, per row or per head.
        frequencies: radians per position of each channel pair, for all rows or per row.
        factor: `Rope.attention_factor`.
    """
    size = 2 * frequencies.shape[-1]
    if size == 0:
        return x
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None, None]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    first, second = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)
