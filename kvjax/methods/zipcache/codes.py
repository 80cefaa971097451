"""Arrays as codes of 2, 4 or 8 bits above a smallest number."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Codes:
    """Integers from 0 to 2^bits - 1 that stand for x = low + step code. Numbers that share a range share low and step.

    A byte has the codes of the channels c, c + C, c + 2 C, ..., where C is the number of bytes; c has the lowest bits.

    Attributes:
        codes: [*tokens, C], where C = D bits / 8.
        low: the smallest number of each range, with axes that broadcast against those of x.
        step: likewise, the range divided by 2^bits - 1. 0 where all numbers of a range are equal.
        bits: 2, 4 or 8.
    """

    codes: UInt8[Array, "*tokens C"]
    low: Float[Array, "..."]
    step: Float[Array, "..."]
    bits: int = field(metadata=STATIC)

    @classmethod
    def of(
        cls, x: Float[Array, "*tokens D"], bits: int, axis: int, real: Bool[Array, "*tokens 1"], dtype: jnp.dtype
    ) -> Codes:
        """Returns the nearest codes, ties to even. They are the nearest to x for low and step as these are stored.

        Args:
            bits: 2, 4 or 8. D bits must be divisible by 8.
            axis: along which numbers share a range.
            real: the tokens that count. Codes of others are zero, and mean nothing.
            dtype: of low and step.
        """
        largest = 2**bits - 1
        x = x.astype(jnp.float32)
        low = jnp.min(jnp.where(real, x, jnp.inf), axis, keepdims=True, initial=jnp.inf)
        high = jnp.max(jnp.where(real, x, -jnp.inf), axis, keepdims=True, initial=-jnp.inf)
        some = low <= high
        low = stored(jnp.where(some, low, 0), dtype)
        # A product, because XLA may turn a division by a constant into one.
        step = stored(jnp.where(some, (high - low) * (1 / largest), 0), dtype)
        codes = jnp.round((x - low) / jnp.where(step > 0, step, 1))
        codes = jnp.where(real, jnp.clip(codes, 0, largest), 0).astype(jnp.uint8)
        return cls(packed(codes, bits), low.astype(dtype), step.astype(dtype), bits)

    def numbers(self) -> Float[Array, "*tokens D"]:
        """Returns low + step code, float32."""
        return self.low.astype(jnp.float32) + self.step.astype(jnp.float32) * unpacked(self.codes, self.bits)


def stored(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Rounds float32 numbers to `dtype` and back. XLA may drop a pair of conversions."""
    form = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=int(form.nexp), mantissa_bits=int(form.nmant))


def packed(codes: UInt8[Array, "*tokens D"], bits: int) -> UInt8[Array, "*tokens C"]:
    """Packs 8 / bits codes into each byte."""
    parts = jnp.split(codes, 8 // bits, axis=-1)
    whole = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        whole = whole | (part << (i * bits))
    return whole


def unpacked(whole: UInt8[Array, "*tokens C"], bits: int) -> UInt8[Array, "*tokens D"]:
    """Returns the inverse of `packed`."""
    return jnp.concatenate([(whole >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], axis=-1)
