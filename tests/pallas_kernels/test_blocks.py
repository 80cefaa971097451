"""Cuts that were measured on a kind of GPU are taken there, and rules elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kvjax.pallas_kernels import QuantizedArray, blocks, triton_attention
from kvjax.pallas_kernels.window_scores import triton as window

KEYS = jax.ShapeDtypeStruct((2, 8, 2048, 128), jnp.bfloat16)
CODES = QuantizedArray.of(jnp.ones((1, 128), jnp.bfloat16), 4, 32)
FOUND = {
    "attend rows=16 D=128 bits=16 bfloat16": [32, 128, 2, 5],
    "attend rows=16 D=128 bits=4 bfloat16": [16, 256, 2, 4],
    "window_scores rows=256 D=128 bits=16 bfloat16": [32, 32, 2, 2],
}


@pytest.mark.parametrize("there", [True, False])
def test_what_was_measured_on_this_kind_of_device_is_taken(monkeypatch, there: bool) -> None:
    kind = jax.local_devices()[0].device_kind if there else "another"
    rules = triton_attention.blocks_for(4, KEYS), triton_attention.blocks_for(16, CODES), window.blocks_for(900, KEYS)
    monkeypatch.setattr(blocks, "table", lambda: {kind: FOUND})
    taken = triton_attention.blocks_for(4, KEYS), triton_attention.blocks_for(16, CODES), window.blocks_for(900, KEYS)
    assert taken == (tuple(map(tuple, FOUND.values())) if there else rules)
    assert triton_attention.blocks_for(17, KEYS) == triton_attention.blocks_for(32, KEYS), "which was not measured"


def test_the_table_holds_what_triton_takes() -> None:
    for kind, found in blocks.table().items():
        for name, (rows, slots, warps, stages) in found.items():
            assert all(n & (n - 1) == 0 for n in (rows, slots, warps)), (kind, name)
            assert min(rows, slots) >= 16, (kind, name)
            assert max(warps, stages) <= 16, (kind, name)
