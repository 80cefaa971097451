"""Shared parts of the Triton kernels: checks of device and arguments, products, and tiles of quantised numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..quantized import QuantizedArray
from .blocks import power_of_two

PROGRAMS = 264  # programs that a GPU should run at a time: two per core of an H100


def check_device() -> None:
    """Raises NotImplementedError on a GPU that the kernels do not serve. A device compiled for ahead is not checked."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "8.0")
    if not re.fullmatch(r"\d+\.\d", capability):
        raise NotImplementedError(f"GPU of kind {capability}: expected an NVIDIA GPU")
    if float(capability) < 8:
        raise NotImplementedError(f"GPU of compute capability {capability}: expected 8.0 or more")


def check(q: Any, k: Any, v: Any, quantized: bool = False) -> None:
    """Raises NotImplementedError for arguments that a kernel does not take.

    Args:
        quantized: whether the kernel takes a QuantizedArray for keys and values.
    """
    check_device()
    arrays = [x for x in (q, k, v) if x is not None]
    for x in arrays:
        if quantized and isinstance(x, QuantizedArray):
            check_codes(x)
        elif not isinstance(x, jax.Array | np.ndarray):
            raise NotImplementedError(f"keys and values of type {type(x).__name__}: expected plain arrays")
    kinds = {jnp.dtype(x.dtype).name for x in arrays}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16", "float16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}: expected one of float32, bfloat16 and float16")
    if q.shape[-1] > 256:
        raise NotImplementedError(f"heads of {q.shape[-1]} channels: expected at most 256")


def check_codes(x: QuantizedArray) -> None:
    """Raises NotImplementedError for codes that do not fill a tile. 4-bit codes make two tiles of half the width."""
    D, least = x.shape[-1], 16 * tiles_per_number(x)
    if power_of_two(D, least) != D:
        raise NotImplementedError(f"heads of {D} channels in {x.bits} bits: expected a power of two >= {least}")


def tiles_per_number(x: Array | QuantizedArray) -> int:
    """The number of tiles that a tile of stored numbers gives: two for 4-bit codes, one per half of the channels."""
    return 2 if isinstance(x, QuantizedArray) and x.bits == 4 else 1


def channel_slices(count: int, D: int, Dp: int) -> list[tuple[Any, Bool[Array, "1 Dp/count"]]]:
    """The slice of channels of each of `count` tiles, and which of these channels exist.

    Args:
        Dp: D rounded up to a power of two. It equals D if there is more than one tile.
    """
    n = Dp // count
    return [(slice(None) if count == 1 else pl.ds(i * n, n), (i * n + jnp.arange(n) < D)[None]) for i in range(count)]


def dequantize_tile(codes: Int[Array, "K C"], scales: Float[Array, "K groups"], dtype: Any) -> Float[Array, "K C"]:
    """Dequantises a tile to the numbers of `QuantizedArray.dequantized`.

    A product of two bfloat16 numbers in bfloat16 is rounded once, as the conversion from float32 is there.
    """
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    K, groups = scales.shape
    scales = jnp.broadcast_to(scales.astype(wide)[:, :, None], (K, groups, codes.shape[1] // groups))
    return (codes.astype(wide) * scales.reshape(codes.shape)).astype(dtype)


def product(x: Array, y: Array) -> Float[Array, "rows columns"]:
    """Returns x @ y in float32. It runs on tensor cores unless x and y are float32 themselves."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
