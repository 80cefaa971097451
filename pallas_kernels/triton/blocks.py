"""Tile sizes of the Triton kernels, measured per kind of GPU.

`benchmarks/tune_kernels.py` measures them and writes the table, blocks.json. A kernel uses a rule of its own if the
table has no entry for its work.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..quantized import QuantizedArray

TABLE = files(__package__) / "blocks.json"
MOST_ROWS = 256  # work with more query rows uses the entry for this number


class Blocks(NamedTuple):
    """Tile sizes of one kernel.

    Attributes:
        rows: query rows per block, a power of two >= 16.
        slots: slots or keys per tile, a power of two >= 16.
        warps: warps per program.
        stages: tiles in the software pipeline.
    """

    rows: int
    slots: int
    warps: int
    stages: int


class Work(NamedTuple):
    """The sizes that the best tile sizes depend on, besides the GPU.

    Attributes:
        operation: "attend" or "window_scores".
        rows: query rows that a program works on together, rounded up to a power of two, at most MOST_ROWS.
        head_dim: D.
        bits: the size of one stored number of a key.
        dtype: the dtype that the kernel computes with.
    """

    operation: str
    rows: int
    head_dim: int
    bits: int
    dtype: str

    @classmethod
    def of(cls, operation: str, rows: int, k: Any) -> Work:
        """The work for keys [..., D], which are an array or a QuantizedArray."""
        bits = k.bits if isinstance(k, QuantizedArray) else 8 * jnp.dtype(k.dtype).itemsize
        return cls(operation, min(power_of_two(rows), MOST_ROWS), k.shape[-1], bits, jnp.dtype(k.dtype).name)

    @property
    def name(self) -> str:
        """The key of this work in the table."""
        return f"{self.operation} rows={self.rows} D={self.head_dim} bits={self.bits} {self.dtype}"


def power_of_two(size: int, least: int = 16) -> int:
    """The next power of two at or above `size` and `least`.

    Triton takes tiles of no other size, and its matrix products none below 16.
    """
    return max(least, pl.next_power_of_2(size))


def small_cores() -> bool:
    """Returns whether a program has 99 KiB of shared memory, as on an RTX 4090 or an L4. Elsewhere it has 163 or more.

    A device compiled for ahead is not known.
    """
    return re.fullmatch(r"8\.[69]|12\.\d", getattr(jax.local_devices()[0], "compute_capability", "8.0")) is not None


def measured(work: Work) -> Blocks | None:
    """The fastest tile sizes on this kind of GPU, or None if they have not been measured."""
    found = table().get(jax.local_devices()[0].device_kind, {}).get(work.name)
    return None if found is None else Blocks(*found)


@cache
def table() -> dict[str, dict[str, list[int]]]:
    """[rows, slots, warps, stages] by kind of GPU and name of the work."""
    return json.loads(TABLE.read_text(encoding="utf-8"))
