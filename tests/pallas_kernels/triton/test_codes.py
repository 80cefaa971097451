"""Products of few query rows with codes: which arguments are served, and attention over them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import QuantizedArray
from kvjax.pallas_kernels.triton.codes import IntegerRows, code_rows
from tests.pallas_kernels.cases import Case, quantized
from tests.pallas_kernels.checks import check_segments, check_slots, jitted, numbers, on_gpu

slot, segment = (import_module(f"kvjax.pallas_kernels.{name}_attention.triton") for name in ("slot", "segment"))


def stored(D: int, per_scale: int, bits: int, dtype: str = "bfloat16") -> QuantizedArray:
    return jax.eval_shape(lambda: QuantizedArray.of(jnp.zeros((1, D), dtype), bits, per_scale))


@pytest.mark.parametrize(
    ("rows", "k", "height"),
    [
        (4, stored(128, 32, 8), 4),
        (4, stored(128, 128, 8), 16),  # a product has 16 rows at least
        (1, stored(128, 128, 4), 8),  # each half of the channels is a group
        (7, stored(128, 32, 4), 8),
        (8, stored(128, 32, 8), 8),
        (9, stored(128, 32, 8), None),  # 64 rows, with copies
        (17, stored(128, 128, 8), 32),
        (1, stored(128, 2, 8), None),
        (4, stored(32, 32, 8), 16),
        (4, stored(32, 32, 4), None),  # 16 channels in a tile
        (4, stored(128, 32, 8, "float16"), None),
        (4, stored(128, 32, 8, "float32"), None),
        (4, jax.ShapeDtypeStruct((1, 128), jnp.bfloat16), None),
    ],
)
def test_few_rows_in_bfloat16_multiply_codes(rows: int, k: QuantizedArray, height: int | None) -> None:
    assert code_rows(rows, k, k) == height


def test_keys_and_values_of_other_groups_are_dequantised() -> None:
    assert code_rows(4, stored(128, 32, 8), stored(128, 64, 8)) is None


@pytest.mark.long(first=1)
@pytest.mark.parametrize(("bits", "per_scale"), [(8, 16), (8, 64), (4, 16), (4, 64)])
def test_products_are_those_of_float32(bits: int, per_scale: int) -> None:
    """A row has channels of very different sizes, and one row is 0."""
    rng = np.random.default_rng(bits)
    q = rng.normal(size=(4, 64)) * 10 ** rng.uniform(-3, 3, (4, 64))
    q[3] = 0
    q = q.astype(jnp.bfloat16)
    k = quantized(rng.normal(size=(20, 64)).astype(jnp.bfloat16), bits, per_scale)
    tiles = [jnp.asarray(x) for x in np.split(q, 8 // bits, axis=1)]
    products = jax.jit(lambda tiles, k: IntegerRows.of(tiles, k).products(k))(tiles, k)
    size = np.abs(q.astype(float)).max(axis=1, keepdims=True)
    error = np.abs(products - q.astype(float) @ numbers(k, rounded=False).astype(float).T)
    assert np.all(error <= 2e-6 * size)
    assert not np.any(products[3])


SLOTS = [
    Case(128, 7, 1, 130, "bfloat16", bits=4, bias="some", window=100),
    Case(64, 4, 3, 140, "bfloat16", bits=8, per_scale=64, softcap=0.8, received="max"),
    Case(64, 2, 1, 70, "bfloat16", bits=4, per_scale=64, received="sum"),
    Case(128, 8, 1, 300, "bfloat16", bits=8),
]
LANES = Case(128, 4, 2, 0, "bfloat16", window=60, bits=4, bias="some")


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_slots(case: Case) -> None:
    check_slots(jitted(slot.slot_attention, interpret=not on_gpu()), case, rounded=False)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_segments(lanes: int) -> None:
    case = replace(LANES, group=4 // lanes)
    check_segments(jitted(segment.segment_attention, interpret=not on_gpu()), case, lanes, rounded=False)
