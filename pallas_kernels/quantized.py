"""Arrays held in 8 or 4 bits: codes, and a scale for each token and group of channels. Arithmetic only, no policies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int8

STATIC = {"static": True}
LARGEST = {8: 127, 4: 7}  # codes are symmetric, so that zero is one of them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """An array of D channels a token: x = code * scale, to half a scale. A token is written without looking at others.

    Of 4-bit codes, channel c of the first half shares a byte with channel c + D/2: it has the lower bits.

    Attributes:
        codes: -127 .. 127, or two of -7 .. 7 a byte.
        scales: of each group of neighbouring channels, its largest magnitude / the largest code.
        bits: 8 or 4.
        dtype: of the array that it stands for.
    """

    codes: Int8[Array, "*tokens D*bits/8"]
    scales: BFloat16[Array, "*tokens D/group"]
    bits: int = field(metadata=STATIC)
    dtype: jnp.dtype = field(metadata=STATIC)

    @classmethod
    def of(cls, x: Float[Array, "*tokens D"], bits: int, group: int) -> QuantizedArray:
        """The nearest codes, ties to the even one, of groups of `group` channels, which divides D."""
        largest = LARGEST[bits]
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
        scales = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / largest
        # XLA may take a conversion to bfloat16 and back for nothing; codes must be those of the scales that are kept.
        scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
        codes = jnp.round(grouped / jnp.where(scales > 0, scales, 1.0))
        codes = jnp.clip(codes, -largest, largest).astype(jnp.int8).reshape(x.shape)
        if bits == 4:
            low, high = jnp.split(codes, 2, axis=-1)
            codes = (low & 15) | (high << 4)
        return cls(codes, scales[..., 0].astype(jnp.bfloat16), bits, jnp.dtype(x.dtype))

    def dequantized(self) -> Float[Array, "*tokens D"]:
        """In float32 exactly code * scale, in other types the nearest number."""
        codes = self.codes
        if self.bits == 4:
            codes = jnp.concatenate([(codes << 4) >> 4, codes >> 4], axis=-1)
        *tokens, groups = self.scales.shape
        grouped = codes.reshape(*tokens, groups, codes.shape[-1] // groups).astype(jnp.float32)
        return (grouped * self.scales[..., None].astype(jnp.float32)).reshape(codes.shape).astype(self.dtype)

    def updated(self, old: Float[Array, "*tokens D"], new: Float[Array, "*tokens D"]) -> QuantizedArray:
        """Tokens that differ between the two, of which `old` is this one dequantised, quantised anew; others as is."""
        changed = jnp.any(old != new, axis=-1, keepdims=True)
        other = QuantizedArray.of(new, self.bits, self.shape[-1] // self.scales.shape[-1])
        codes, scales = (jnp.where(changed, x, y) for x, y in ((other.codes, self.codes), (other.scales, self.scales)))
        return replace(self, codes=codes, scales=scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        *tokens, width = self.codes.shape
        return (*tokens, width * 8 // self.bits)


Stored: TypeAlias = Array | QuantizedArray


def plain(x: Stored) -> Array:
    """What a cache holds as parts and attention see it."""
    return x.dequantized() if isinstance(x, QuantizedArray) else x


def updated(stored: Stored, old: Array, new: Array) -> Stored:
    """What is held once `old`, which is `plain(stored)`, has become `new`."""
    if new is old:
        return stored
    return stored.updated(old, new) if isinstance(stored, QuantizedArray) else new
