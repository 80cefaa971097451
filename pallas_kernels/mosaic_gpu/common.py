"""Shared parts of Mosaic GPU kernels: checks of the device and of JAX, products of matrices, and the interpreter."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..quantized import QuantizedArray

# What multiplies matrices: instructions of a warp (mma), for 16 rows or more, which need JAX 0.11; instructions of four
# warps (wgmma), for 64 rows, which only Hopper has; or XLA (lax), where a kernel is interpreted.
Products = Literal["mma", "wgmma", "lax"]
MMA = getattr(plgpu, "mma", None)
MOST_ROWS = 64  # query rows per program


def capability() -> tuple[int, int]:
    """The compute capability that is compiled for.

    Raises:
        NotImplementedError: for a GPU that is neither Hopper nor a Blackwell of data centres.
    """
    found = getattr(jax.local_devices()[0], "compute_capability", "9.0")  # a device compiled for ahead is not known
    match = re.fullmatch(r"(9|10)\.(\d)", found)
    if match is None:
        raise NotImplementedError(f"GPU of compute capability {found}: expected 9.x or 10.x")
    return int(match[1]), int(match[2])


def products_for(rows: int, capability: tuple[int, int]) -> Products:
    """Returns the function that multiplies matrices with the fewest rows of padding.

    Raises:
        NotImplementedError: if this JAX has nothing for the GPU.
    """
    if capability[0] == 9 and (rows > 16 or MMA is None):
        return "wgmma"
    if MMA is None:
        raise NotImplementedError(
            f"GPU of compute capability {capability[0]}.{capability[1]}: expected JAX 0.11 or more"
        )
    return "mma"


def products_here(rows: int, *, interpret: bool) -> Products:
    """Returns what multiplies matrices on this device, or in the interpreter. Raises NotImplementedError."""
    return "lax" if interpret else products_for(rows, capability())


def check(q: Any, k: Any, v: Any, *, rows: int) -> None:
    """Raises NotImplementedError for arguments that the kernel does not take.

    Args:
        rows: query rows per kv head.
    """
    for x in (k, v):
        if isinstance(x, QuantizedArray):
            parts = parts_of(x.scales.shape[-1], x.bits)
            if parts % (8 // x.bits) or x.shape[-1] // parts % 32:
                raise NotImplementedError(
                    f"{x.scales.shape[-1]} scales of {x.shape[-1]} channels in {x.bits} bits: expected one for a "
                    f"multiple of 32 channels, all in one half"
                )
        elif not isinstance(x, jax.Array | np.ndarray):
            raise NotImplementedError(f"keys and values of type {type(x).__name__}: expected arrays or codes")
    kinds = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}: expected one of bfloat16 and float16")
    if q.shape[-1] % 32 != 0 or q.shape[-1] > 256:
        raise NotImplementedError(f"heads of {q.shape[-1]} channels: expected a multiple of 32, at most 256")
    if k.shape[2] % 8 != 0:  # TMA copies 8 rows at a time
        raise NotImplementedError(f"{k.shape[2]} slots: expected a multiple of 8")
    if rows > MOST_ROWS:
        raise NotImplementedError(f"{rows} query rows per kv head: expected at most {MOST_ROWS}")


def parts_of(groups: int, bits: int) -> int:
    """The number of parts of the channels of codes, each of which has one scale and lies in one half of the bytes."""
    return max(groups, 8 // bits)


def product(x: Any, y: Any, products: Products, *, transposed: bool = False) -> Float[Array, "rows columns"]:
    """Returns x @ y in float32.

    Args:
        x: a reference to shared memory; for wgmma and lax also an array.
        y: a reference to shared memory.
        transposed: whether y is transposed first.
    """
    rows, columns = x.shape[0], y.shape[0 if transposed else 1]
    if products == "lax":
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        return jax.lax.dot_general(x[...], y[...], contracted, preferred_element_type=jnp.float32)
    y = y.transpose((1, 0)) if transposed else y
    if products == "mma":
        assert MMA is not None
        return MMA(jnp.zeros((rows, columns), jnp.float32), x[...], y[...])

    def multiply(sums: Any) -> Array:
        plgpu.wgmma(sums, x, y)
        return sums[...]  # waits for the products

    return pl.run_scoped(multiply, plgpu.ACC((rows, columns), jnp.float32))


def over(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcasts a vector along one axis of a matrix to all of it."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def interpreted(*, ragged: bool) -> Any:
    """Parameters of the interpreter, which runs a kernel step by step on any platform.

    Memory begins as NaN. A copy from beyond an array's end gives zeros on a GPU.

    Args:
        ragged: whether the kernel copies from beyond an array's end. Memory then begins as zeros as well.
    """
    module = import_module("jax._src.pallas.mosaic_gpu.interpret.params")  # JAX 0.10 does not export it
    return module.InterpretGPUParams(
        out_of_bounds_reads="uninitialized" if ragged else "raise", uninitialized_memory="zero" if ragged else "nan"
    )
