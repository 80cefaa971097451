"""Arrays stored in 8 or 4 bits: integer codes, and one scale per token and group of channels. No policies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int8

STATIC = {"static": True}
LARGEST = {8: 127, 4: 7}  # the largest code; codes are symmetric, so that zero is a code


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """A quantised array with D channels per token: x = code * scale, exact to half a scale.

    Tokens are quantised independently, so that one can be written without the others. With 4 bits, channels c and
    c + D/2 are stored in one byte; channel c has the lower four bits.

    Attributes:
        codes: integers from -127 to 127, or two integers from -7 to 7 per byte.
        scales: one per group of neighbouring channels: the group's largest magnitude / the largest code.
        bits: 8 or 4.
        dtype: the dtype of the dequantised array.
    """

    codes: Int8[Array, "*tokens D*bits/8"]
    scales: BFloat16[Array, "*tokens D/group"]
    bits: int = field(metadata=STATIC)
    dtype: jnp.dtype = field(metadata=STATIC)

    @classmethod
    def of(cls, x: Float[Array, "*tokens D"], bits: int, group: int) -> QuantizedArray:
        """Quantises x to the nearest codes, ties to even.

        Args:
            bits: 8 or 4.
            group: channels per scale; divides D.
        """
        largest = LARGEST[bits]
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
        # A product: XLA may turn a division by a constant into one, and a last bit decides which bfloat16 is nearest.
        scales = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) * (1 / largest)
        # XLA may drop a conversion to bfloat16 and back. The codes must belong to the scales as they are stored.
        scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
        codes = jnp.round(grouped / jnp.where(scales > 0, scales, 1.0))
        codes = jnp.clip(codes, -largest, largest).astype(jnp.int8).reshape(x.shape)
        if bits == 4:
            low, high = jnp.split(codes, 2, axis=-1)
            codes = (low & 15) | (high << 4)
        return cls(codes, scales[..., 0].astype(jnp.bfloat16), bits, jnp.dtype(x.dtype))

    def dequantized(self) -> Float[Array, "*tokens D"]:
        """Returns code * scale: exact in float32, rounded to nearest in other dtypes."""
        codes = self.codes
        if self.bits == 4:
            codes = jnp.concatenate([(codes << 4) >> 4, codes >> 4], axis=-1)
        *tokens, groups = self.scales.shape
        grouped = codes.reshape(*tokens, groups, codes.shape[-1] // groups).astype(jnp.float32)
        return (grouped * self.scales[..., None].astype(jnp.float32)).reshape(codes.shape).astype(self.dtype)

    def updated(self, old: Float[Array, "*tokens D"], new: Float[Array, "*tokens D"]) -> QuantizedArray:
        """Returns this array with changed tokens quantised anew and all others untouched.

        Args:
            old: this array, dequantised.
            new: the array to store. A token has changed if it differs from `old` in some channel.
        """
        changed = jnp.any(old != new, axis=-1, keepdims=True)
        other = QuantizedArray.of(new, self.bits, self.shape[-1] // self.scales.shape[-1])
        codes, scales = (jnp.where(changed, x, y) for x, y in ((other.codes, self.codes), (other.scales, self.scales)))
        return replace(self, codes=codes, scales=scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array."""
        *tokens, width = self.codes.shape
        return (*tokens, width * 8 // self.bits)


Stored: TypeAlias = Array | QuantizedArray
"""Keys or values as a cache stores them."""


def plain(x: Stored) -> Array:
    """Returns the stored array, dequantised if it is quantised."""
    return x.dequantized() if isinstance(x, QuantizedArray) else x


def updated(stored: Stored, old: Array, new: Array) -> Stored:
    """Returns what to store after `old`, which is `plain(stored)`, has been changed to `new`."""
    if new is old:
        return stored
    return stored.updated(old, new) if isinstance(stored, QuantizedArray) else new
