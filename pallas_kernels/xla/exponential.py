"""The exponential function of what XLA compiles, which spend a large part of their time in it on a CPU."""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import platform

ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000  # the last bits of x + ROUND are those of the integer nearest to x
# 2^x for |x| <= 1/2, lowest power first: the smallest maximum of the relative error, 8e-8, with 2^0 = 1. A query that
# sees one entry then gives it a weight of exactly 1.
POWERS = (1.0, 0.69314706, 0.24022235, 0.055506784, 0.009671962, 0.0013274633)


def exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns e^x of float32 numbers x < 88. The result is 0 for x < -87.7.

    On a CPU it takes half the time of XLA's function, and less where XLA fuses it with other operations. The relative
    error is at most 3e-7 + 1e-7 |x|.
    """
    if platform() != "cpu":
        return jnp.exp(x)
    x = jnp.maximum(x * math.log2(math.e), -127.0)  # nothing below becomes NaN, which `jax_debug_nans` would report
    nearest = jax.lax.bitcast_convert_type(x + ROUND, jnp.int32) - ROUND_BITS
    fraction = x - nearest.astype(jnp.float32)
    polynomial = reduce(lambda total, power: total * fraction + power, reversed(POWERS), jnp.zeros_like(x))
    # XLA sums rows by a library, which may take the products before a sum into its own loop. It then computes the
    # exponentials a second time, in ten times the time. It takes no selection.
    return jnp.where(x < -126.5, 0.0, jax.lax.bitcast_convert_type((nearest + 127) << 23, jnp.float32) * polynomial)
