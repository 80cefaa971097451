"""Tile sizes: those measured on a kind of GPU are used there, and rules elsewhere."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kvjax.pallas_kernels import QuantizedArray
from kvjax.pallas_kernels.triton import blocks
from kvjax.pallas_kernels.triton.attention import attend_blocks
from kvjax.pallas_kernels.window_scores.triton import score_blocks

KEYS = jax.ShapeDtypeStruct((2, 8, 2048, 128), jnp.bfloat16)
CODES = QuantizedArray.of(jnp.ones((1, 128), jnp.bfloat16), 4, 32)
FOUND = {
    "attend rows=16 D=128 bits=16 bfloat16": [32, 128, 2, 5],
    "attend rows=16 D=128 bits=4 bfloat16": [16, 256, 2, 4],
    "window_scores rows=256 D=128 bits=16 bfloat16": [32, 32, 2, 2],
}


@pytest.mark.parametrize("same_kind", [True, False])
def test_measured_sizes_are_used_on_their_kind_of_gpu_only(monkeypatch, same_kind: bool) -> None:
    kind = jax.local_devices()[0].device_kind if same_kind else "another"

    def chosen() -> tuple[blocks.Blocks, ...]:
        return attend_blocks(4, KEYS), attend_blocks(16, CODES), score_blocks(900, KEYS)

    by_rule = chosen()
    monkeypatch.setattr(blocks, "table", lambda: {kind: FOUND})
    assert chosen() == (tuple(map(tuple, FOUND.values())) if same_kind else by_rule)
    assert attend_blocks(17, KEYS) == attend_blocks(32, KEYS), "these rows have not been measured"


def test_the_table_holds_sizes_that_triton_accepts() -> None:
    for kind, found in blocks.table().items():
        for name, (rows, slots, warps, stages) in found.items():
            assert all(n & (n - 1) == 0 for n in (rows, slots, warps)), (kind, name)
            assert min(rows, slots) >= 16, (kind, name)
            assert max(warps, stages) <= 16, (kind, name)


@pytest.mark.parametrize(("capability", "room"), [("8.6", 99), ("8.9", 99), ("12.0", 99), ("8.0", 163), ("9.0", 227)])
def test_query_rows_and_tiles_fit_the_shared_memory_of_a_core(monkeypatch, capability: str, room: int) -> None:
    """By the sum that the compiler reports: a tile per stage but one, the query rows, and 5 KiB for weights."""
    device = SimpleNamespace(device_kind="another", compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    sizes = product([1, 16, 17, 32, 33, 64, 65, 900], [64, 80, 96, 112, 128, 160, 192, 256], ["bfloat16", "float32"])
    for rows, D, dtype in sizes:
        k = jax.ShapeDtypeStruct((2, 8, 2048, D), dtype)
        for value_dim, extra in [(D, 0), (256, 0), *[(D, 32)] * (rows <= 16)]:
            found = attend_blocks(rows, k, extra, value_dim)
            keys, values = map(blocks.power_of_two, (D, value_dim))
            numbers = (found.stages - 1) * found.slots * (keys + values) + (found.rows + extra) * keys
            # Registers hold the weights of 128 rows.
            taken = numbers * k.dtype.itemsize + (5 << 10 if found.rows < 128 else 1 << 10)
            assert taken <= room << 10, (rows, D, value_dim, extra, dtype, found, taken)
