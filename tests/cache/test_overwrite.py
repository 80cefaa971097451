"""Overwriting by a pass and by a scatter against NumPy; the HLO shows which of them a device is given."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.overwrite import (
    SMALL,
    change_block,
    change_by_pass,
    change_by_scatter,
    clear_by_pass,
    clear_by_scatter,
    clear_slot,
    mark,
    set_by_gather,
    set_by_head,
    set_by_pass,
    set_by_row,
    set_entries,
    set_slot,
    set_slots,
)

RNG = np.random.default_rng(0)
marked = jax.jit(mark, static_argnums=1)


@pytest.mark.parametrize("clear", [clear_slot, clear_by_pass, clear_by_scatter])
@pytest.mark.parametrize("state", [(), (3,), (2, 3)])
def test_clears_a_slot_of_each_head(clear, state: tuple[int, ...]) -> None:
    x = RNG.normal(size=(3, 2, *state, 5)).astype(np.float32)
    slot = np.array([[0, 4], [5, 2], [5, 5]])
    expected = x.copy()
    for b, h in np.argwhere(slot < 5):
        expected[b, h, ..., slot[b, h]] = 0
    np.testing.assert_array_equal(jax.jit(clear)(x, slot), expected)


@pytest.mark.parametrize("numbers", [(), (4,), (32,)])
def test_sets_slots_whatever_they_hold(numbers: tuple[int, ...]) -> None:
    x, new = (RNG.normal(size=(3, *size, *numbers)).astype(np.float32) for size in ((2, 5), (4,)))
    at = np.arange(3)[:, None], np.array([0, 0, 1, 1]), np.array([[0, 4, 1, 5], [5, 2, 3, 0], [5, 5, 5, 5]])
    expected = x.copy()
    for b, i in np.argwhere(at[2] < 5):
        expected[b, at[1][i], at[2][b, i]] = new[b, i]
    np.testing.assert_array_equal(jax.jit(set_slots)(x, at, new), expected)


@pytest.mark.parametrize("write", [set_entries, set_by_gather, set_by_row, set_by_head])
@pytest.mark.parametrize("numbers", [(), (3,)])
def test_sets_entries_of_all_heads(write, numbers: tuple[int, ...]) -> None:
    x, new = (RNG.normal(size=(3, 2, n, *numbers)).astype(np.float32) for n in (5, 2))
    index = np.array([[0, 4], [5, 2], [5, 5]])
    expected = x.copy()
    for b, i in np.argwhere(index < 5):
        expected[b, :, index[b, i]] = new[b, :, i]
    np.testing.assert_array_equal(jax.jit(write)(x, index, new), expected)


@pytest.mark.parametrize("write", [change_block, change_by_pass, change_by_scatter])
def test_changes_a_block_of_each_row(write) -> None:
    x = RNG.normal(size=(3, 2, 4, 5)).astype(np.float32)
    add = RNG.normal(size=(3, 2, 5)).astype(np.float32)
    expected = x.copy()
    for b, block in enumerate([3, 4, 0]):
        if block < 4:
            expected[b, :, block] += add[b]
    changed = jax.jit(partial(write, change=lambda part: part + add[:, :, None]))(x, np.array([3, 4, 0]))
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("size", [5, SMALL])
def test_sets_a_slot_of_each_head(size: int) -> None:
    """By a pass and by a scatter on a GPU, whose choice depends on the size."""
    x, new = RNG.integers(0, 9, (3, 2, size)), RNG.integers(9, 18, (3, 2))
    slot = np.array([[0, size - 1], [size, 2], [size, size]])
    expected = x.copy()
    for b, h in np.argwhere(slot < size):
        expected[b, h, slot[b, h]] = new[b, h]
    np.testing.assert_array_equal(jax.jit(set_slot)(x, slot, new), expected)


def test_a_pass_sets_one_entry_of_all_heads() -> None:
    x, new, index = RNG.normal(size=(3, 2, 5, 4)), RNG.normal(size=(3, 2, 1, 4)), np.array([[0], [4], [5]])
    arrays = [a.astype(np.float32 if a.dtype == float else np.int32) for a in (x, index, new)]
    np.testing.assert_array_equal(jax.jit(set_by_pass)(*arrays), jax.jit(set_by_head)(*arrays))


@pytest.mark.parametrize("index", [[[0]], [[4]], [[5]], [[-1]]])
def test_one_mark_is_what_several_would_be(index: list[list[int]]) -> None:
    one = np.array([index])
    several = np.concatenate([one, np.full_like(one, -1)], axis=-1)
    np.testing.assert_array_equal(marked(one, 5), marked(several, 5))


@pytest.mark.parametrize(
    ("platform", "slots", "scatters"),
    [("cpu", 5, False), ("cpu", SMALL, False), ("cuda", 5, False), ("cuda", SMALL, True), ("tpu", 5, True)],
)
def test_accelerators_scatter_into_large_states(platform: str, slots: int, scatters: bool) -> None:
    shapes = jax.ShapeDtypeStruct((3, 2, 4, slots), jnp.float32), jax.ShapeDtypeStruct((3, 2), jnp.int32)
    text = jax.jit(clear_slot).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.scatter" in text) == scatters


def test_a_cpu_compiles_no_scatter_for_a_prompt_or_a_position() -> None:
    x, index, new = jnp.zeros((3, 2, 5)), jnp.zeros((3, 4), jnp.int32), jnp.ones((3, 2, 4))
    assert "scatter" not in jax.jit(set_entries).trace(x, index, new).lower(lowering_platforms=("cpu",)).as_text()
    assert (
        "scatter"
        not in jax.jit(set_slot).trace(x, index[:, :2], new[..., 0]).lower(lowering_platforms=("cpu",)).as_text()
    )
