"""Overwrites of one entry per kv head: the TPU kernel, interpreted, equals XLA's scatter."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

kernel, reference = (import_module(f"kvjax.pallas_kernels.write_rows.{name}") for name in ("mosaic_tpu", "reference"))


@pytest.mark.parametrize(
    ("rows", "heads", "lanes", "length", "channels", "dtype"),
    [
        (2, 4, 4, 300, 64, "bfloat16"),
        (2, 4, 2, 300, 96, "float32"),  # two heads of a lane may write to the same 128 entries
        (3, 4, 1, 64, 40, "int8"),
        (5, 3, 3, 130, 80, "bfloat16"),  # several steps of the grid, of which the last has fewer heads
    ],
)
def test_one_row_of_each_head(rows, heads, lanes, length, channels, dtype, monkeypatch):
    """The first head's row lies beyond the last one and is dropped. Scales are scattered."""
    monkeypatch.setattr(kernel, "BUFFER_BYTES", 1 << 18)
    rng = np.random.default_rng(rows)
    before = (20 * rng.normal(size=(rows, lanes, length, channels))).astype(jnp.dtype(dtype))
    new = (20 * rng.normal(size=(rows, heads, channels))).astype(before.dtype)
    row = np.stack([rng.permutation(40)[:heads] + length - 40 for _ in range(rows)])
    row[0, 0] = length
    stored, entry = {"codes": before, "scales": before[..., :2]}, {"codes": new, "scales": new[..., :2]}
    written = jax.jit(partial(kernel.write_rows, interpret=True))(stored, row, entry)
    expected = before.copy()
    for b, h in list(np.ndindex(rows, heads))[1:]:
        expected[b, h // (heads // lanes), row[b, h]] = new[b, h]
    assert written["codes"].dtype == before.dtype
    np.testing.assert_array_equal(written["codes"], expected)
    np.testing.assert_array_equal(written["scales"], expected[..., :2])
    for ours, theirs in zip(written.values(), jax.jit(reference.write_rows)(stored, row, entry).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("channels", [16, 128])
def test_entries_that_fill_vector_lanes_or_are_a_few_numbers_are_scattered(channels, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", None)
    x, new = jnp.zeros((1, 2, 20, channels)), jnp.ones((1, 2, channels))
    assert jax.jit(kernel.write_rows)(x, jnp.array([[3, 4]]), new).sum() == 2 * channels
