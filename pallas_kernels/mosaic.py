"""What the TPU kernels share: sizes, products, visibility, and a softmax under way in on-chip memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from .quantized import QuantizedArray

Interpret = bool | pltpu.InterpretParams

LANES = 128  # of a vector register; SUBLANES x LANES 32-bit numbers
SUBLANES = 8
VMEM = 32 << 20  # bytes that a kernel may take; the smallest of v5e, v5p and v6e has 64 MB
SMEM = 512 << 10  # bytes for the scalars that say what to fetch; there are 1 MB


def check(*given: Any, quantized: bool = False) -> None:
    """Raises NotImplementedError for what a kernel does not take, be it one that takes `quantized` keys and values."""
    for x in given:
        if not isinstance(x, jax.Array | np.ndarray) and not (quantized and isinstance(x, QuantizedArray)):
            raise NotImplementedError("keys and values that are not plain arrays")
    kinds = {jnp.dtype(x.dtype).name for x in given}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}; one of float32 and bfloat16 is taken")


def in_place(x: Array, interpret: Interpret) -> Array:
    """Says that an operand stays in main memory: XLA would move some caches into VMEM to write a slot, and back."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def tile_size(length: int, most: int) -> int:
    """Entries to a tile: as few tiles as possible, of equal size, at most `most` (a multiple of LANES) each."""
    return length if length <= most else round_up(-(-length // -(-length // most)), LANES)


def params(*semantics: Literal["parallel", "arbitrary"], vmem: int = VMEM) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem)


def product(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """A matrix product in float32, without rounding float32 operands to bfloat16 as a TPU does left to itself."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


class Softmax(NamedTuple):
    """A softmax under way for R rows: output so far (not yet divided), sum of exponentials, maximum."""

    out: Float[Array, "*parts R D"]
    total: Float[Array, "R 1"]
    peak: Float[Array, "R 1"]

    @staticmethod
    def scratch(shape: Sequence[int]) -> list[pl.MemoryRef]:
        """For an output of such a shape."""
        rows = shape[-2]
        return [pltpu.VMEM(tuple(each), jnp.float32) for each in (shape, (rows, 1), (rows, 1))]

    def begin(self) -> None:
        self.out[...] = jnp.zeros(self.out.shape, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.peak[...] = jnp.full(self.peak.shape, -jnp.inf, jnp.float32)

    def add(self, logits: Float[Array, "R K"], weighed: Callable[[Array], Float[Array, "*parts R D"]]) -> None:
        """Adds a tile of entries; `weighed` is the sum of its values with weights [R, K]."""
        before = self.peak[...]
        peak = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        finite = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights = jnp.exp(logits - finite)
        shrink = jnp.exp(before - finite)
        self.peak[...] = peak
        self.total[...] = self.total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        self.out[...] = self.out[...] * shrink + weighed(weights)

    def end(self) -> tuple[Float[Array, "*parts R D"], Float[Array, "R 1"]]:
        """The context and the log-sum-exp."""
        total = self.total[...]
        divisor = jnp.where(total == 0, 1.0, total)
        return self.out[...] / divisor, self.peak[...] + jnp.log(divisor)


def seen(
    t: Int[Array, "R 1"], p: Int[Array, "1 K"], window: int | None, held: Bool[Array, "1 K"] | None = None
) -> Bool[Array, "R K"]:
    """As `visibility.visible`, of a tile."""
    see = (p >= 0) & (p <= t)
    if window is not None:
        see &= t - p < window
    return see if held is None else see & held


def row_positions(q_positions: Int[Array, "B W"], group: int) -> Int[Array, "B G*W 1"]:
    """The position of each of a kv head's query rows, group-major, as a column."""
    return jnp.tile(q_positions.astype(jnp.int32), (1, group))[..., None]


def as_column(row: Array) -> Array:
    """[K, 1] from [1, K]."""
    return jnp.broadcast_to(row, (SUBLANES, row.shape[1])).T[:, :1]


def lies_turned(head_dim: int) -> bool:
    """Whether a TPU holds keys and values with entries, not channels, along its lanes: where channels do not fill them.

    Kernels that took them the other way round would have them copied.
    """
    return head_dim % LANES != 0
