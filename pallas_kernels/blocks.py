"""How the Triton kernels cut their work on GPUs where that has been measured; elsewhere each has a rule of its own.

`scripts/tune_kernels.py` measures, and writes the table, blocks.json.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .quantized import QuantizedArray

TABLE = files(__package__) / "blocks.json"
MOST_ROWS = 256  # more are cut in the same way


class Blocks(NamedTuple):
    """How the work is cut. Numbers of rows and slots are powers of two, 16 or more."""

    rows: int
    slots: int
    warps: int
    stages: int


class Work(NamedTuple):
    """What a cut depends on, beside the GPU.

    Attributes:
        operation: "attend" or "window_scores".
        rows: of queries, that are worked on together.
        head_dim: channels, D.
        bits: of a number of a key as it is held.
        dtype: that it is computed in.
    """

    operation: str
    rows: int
    head_dim: int
    bits: int
    dtype: str

    @classmethod
    def of(cls, operation: str, rows: int, k: Any) -> Work:
        """For keys [..., D], an array or codes."""
        bits = k.bits if isinstance(k, QuantizedArray) else 8 * jnp.dtype(k.dtype).itemsize
        return cls(operation, min(power_of_two(rows), MOST_ROWS), k.shape[-1], bits, jnp.dtype(k.dtype).name)

    @property
    def name(self) -> str:
        """In the table."""
        return f"{self.operation} rows={self.rows} D={self.head_dim} bits={self.bits} {self.dtype}"


def power_of_two(size: int, least: int = 16) -> int:
    """The next one at or above `size`: Triton knows no other sizes, and its matrix products none below 16."""
    return max(least, pl.next_power_of_2(size))


def measured(work: Work) -> Blocks | None:
    """What was found best on GPUs of this machine's kind, if that has been looked for."""
    found = table().get(jax.local_devices()[0].device_kind, {}).get(work.name)
    return None if found is None else Blocks(*found)


@cache
def table() -> dict[str, dict[str, list[int]]]:
    """Rows, slots, warps and stages by kind of GPU and name of the work."""
    return json.loads(TABLE.read_text(encoding="utf-8"))
