"""Shared parts of the TPU kernels: limits, checks, products, visibility, and a running softmax in on-chip memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from ..quantized import QuantizedArray
from ..softmax import finite_or_zero

Interpret = bool | pltpu.InterpretParams

LANES = 128  # of a vector register, which holds SUBLANES x LANES 32-bit numbers; not the lanes of a pool
SUBLANES = 8
VMEM_BYTES = 32 << 20  # vector memory that a kernel may take; v5e, v5p and v6e have 64 MB or more
SMEM_BYTES = 512 << 10  # scalar memory for what is prefetched, of 1 MB
MOST_QUERY_ROWS = 2048  # per kv head, held on the chip
MOST_TILE_LOGITS = 1 << 19  # logits of a part of a tile and all query rows of a kv head
TILE_BYTES = 1 << 20  # of the keys of a tile; values take as much. A step starts in 0.35 µs, v6e fetches both in 1.3 µs
SLOW = {"TPU v5 lite", "TPU v5e"}  # chips with half of the others' bandwidth per core, which take half of a tile


class Chip(NamedTuple):
    """Facts about the chip that kernels are compiled for.

    Attributes:
        tile_bytes: of the keys of a tile, which take longer to fetch than a step takes to start.
        cores: that share the steps of a grid.
    """

    tile_bytes: int
    cores: int


def chip() -> Chip:
    """The chip that is compiled for: that of the mesh of the surrounding `jax.shard_map`, else the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    cores = device.num_cores if device.platform == "tpu" else 1
    return Chip(TILE_BYTES // 2 if device.device_kind in SLOW else TILE_BYTES, cores or 1)


def check(*given: Any, quantized: bool = False) -> None:
    """Raises NotImplementedError for arguments that a kernel does not take.

    Args:
        quantized: whether the kernel takes a QuantizedArray for keys and values.
    """
    for x in given:
        if not isinstance(x, jax.Array | np.ndarray) and not (quantized and isinstance(x, QuantizedArray)):
            raise NotImplementedError(f"keys and values of type {type(x).__name__}: expected plain arrays")
    kinds = {jnp.dtype(x.dtype).name for x in given}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}: expected one of float32 and bfloat16")


def in_place(x: Array, interpret: Interpret) -> Array:
    """Pins an operand to main memory. XLA would otherwise move some caches into VMEM to write a slot, and back."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def tile_size(length: int, most: int) -> int:
    """Entries per tile, for as few tiles of equal size as possible. A tile has at most `most`, a multiple of LANES."""
    return length if length <= most else round_up(-(-length // -(-length // most)), LANES)


def compiler_params(*semantics: Literal["parallel", "arbitrary"], vmem: int = VMEM_BYTES) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem)


def product(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """A matrix product in float32. A TPU would round float32 operands to bfloat16 by default; this does not."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


class SoftmaxScratch(NamedTuple):
    """A running softmax of R query rows in VMEM.

    Attributes:
        out: the sum of values, weighted by exponentials and not yet divided by `total`.
        total: the sum of exp(logit - peak).
        peak: the largest logit; -inf if no tile had a visible entry.
    """

    out: Float[Array, "*parts R D"]
    total: Float[Array, "R 1"]
    peak: Float[Array, "R 1"]

    @staticmethod
    def scratch(shape: Sequence[int]) -> list[pl.MemoryRef]:
        """Scratch memory for an output of the given shape."""
        rows = shape[-2]
        return [pltpu.VMEM(tuple(each), jnp.float32) for each in (shape, (rows, 1), (rows, 1))]

    def begin(self) -> None:
        self.out[...] = jnp.zeros(self.out.shape, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.peak[...] = jnp.full(self.peak.shape, -jnp.inf, jnp.float32)

    def add(self, logits: Float[Array, "R K"], weigh: Callable[[Array], Float[Array, "*parts R D"]]) -> None:
        """Adds a tile of K entries.

        Args:
            weigh: returns the sum of the tile's values, weighted by [R, K].
        """
        before = self.peak[...]
        peak = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        finite = finite_or_zero(peak)
        weights = jnp.exp(logits - finite)
        shrink = jnp.exp(before - finite)
        self.peak[...] = peak
        self.total[...] = self.total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        self.out[...] = self.out[...] * shrink + weigh(weights)

    def end(self) -> tuple[Float[Array, "*parts R D"], Float[Array, "R 1"]]:
        """Returns the context and the log-sum-exp."""
        total = self.total[...]
        divisor = jnp.where(total == 0, 1.0, total)
        return self.out[...] / divisor, self.peak[...] + jnp.log(divisor)


def visible_in_tile(
    t: Int[Array, "R 1"], p: Int[Array, "1 K"], window: int | None, exists: Bool[Array, "1 K"] | None = None
) -> Bool[Array, "R K"]:
    """Applies the rule of `visibility.visible` to one tile.

    Args:
        exists: False for entries of the tile that lie beyond the array.
    """
    seen = (p >= 0) & (p <= t)
    if window is not None:
        seen &= t - p < window
    return seen if exists is None else seen & exists


def row_positions(q_positions: Int[Array, "B W"], group: int) -> Int[Array, "B G*W 1"]:
    """The positions of the query rows of a kv head, group-major, as a column."""
    return jnp.tile(q_positions.astype(jnp.int32), (1, group))[..., None]


def as_column(row: Array) -> Array:
    """Turns [1, K] into [K, 1]."""
    return jnp.broadcast_to(row, (SUBLANES, row.shape[1])).T[:, :1]


def stored_transposed(head_dim: int) -> bool:
    """Returns whether a TPU stores keys and values with entries along vector lanes, which channels would not fill.

    The kernels take such arrays transposed. XLA would otherwise copy them before each call.
    """
    return head_dim % LANES != 0
