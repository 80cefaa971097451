"""Overwriting by a pass and by a scatter against NumPy; the HLO shows which of them a device is given."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import change_block, set_entries, set_slot, set_slots
from kvjax.pallas_kernels.overwrites import SMALL
from tests.pallas_kernels.checks import of_platform

RNG = np.random.default_rng(0)


@pytest.fixture(params=["cpu", "cuda", "default"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    """Runs a function in the form of each platform."""
    monkeypatch.setattr(jax.lax, "platform_dependent", of_platform(request.param))
    return lambda write, *arrays: np.asarray(jax.jit(lambda *arrays: write(*arrays))(*arrays))


@pytest.mark.parametrize("state", [(), (3,), (2, 3)])
@pytest.mark.parametrize("clears", [False, True])
def test_sets_a_slot_of_each_head(run: Callable[..., np.ndarray], state: tuple[int, ...], clears: bool) -> None:
    x = RNG.normal(size=(3, 2, *state, 5)).astype(np.float32)
    new = 0 * x[..., 0] if clears else x[..., 0] + 1
    slot = np.array([[0, 4], [5, 2], [5, 5]])
    expected = x.copy()
    for b, h in np.argwhere(slot < 5):
        expected[b, h, ..., slot[b, h]] = new[b, h]
    got = run(lambda x, slot: set_slot(x, slot, 0), x, slot) if clears else run(set_slot, x, slot, new)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("numbers", [(), (4,), (32,)])
def test_sets_slots_whatever_they_hold(numbers: tuple[int, ...]) -> None:
    x, new = (RNG.normal(size=(3, *size, *numbers)).astype(np.float32) for size in ((2, 5), (4,)))
    at = np.arange(3)[:, None], np.array([0, 0, 1, 1]), np.array([[0, 4, 1, 5], [5, 2, 3, 0], [5, 5, 5, 5]])
    expected = x.copy()
    for b, i in np.argwhere(at[2] < 5):
        expected[b, at[1][i], at[2][b, i]] = new[b, i]
    np.testing.assert_array_equal(jax.jit(set_slots)(x, at, new), expected)


@pytest.mark.parametrize("numbers", [(), (3,)])
@pytest.mark.parametrize("index", [[[0, 4], [5, 2], [5, 5]], [[3], [0], [5]]])
def test_sets_entries_of_all_heads(
    run: Callable[..., np.ndarray], index: list[list[int]], numbers: tuple[int, ...]
) -> None:
    at = np.array(index)
    x, new = (RNG.normal(size=(3, 2, n, *numbers)).astype(np.float32) for n in (5, at.shape[1]))
    expected = x.copy()
    for b, i in np.argwhere(at < 5):
        expected[b, :, at[b, i]] = new[b, :, i]
    np.testing.assert_array_equal(run(set_entries, x, at, new), expected)


def test_changes_a_block_of_each_row(run: Callable[..., np.ndarray]) -> None:
    x = RNG.normal(size=(3, 2, 4, 5)).astype(np.float32)
    add = RNG.normal(size=(3, 2, 5)).astype(np.float32)
    expected = x.copy()
    for b, block in enumerate([3, 4, 0]):
        if block < 4:
            expected[b, :, block] += add[b]
    got = run(lambda x, block: change_block(x, block, lambda part: part + add[:, :, None]), x, np.array([3, 4, 0]))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("platform", "slots", "scatters"),
    [("cpu", 5, False), ("cpu", SMALL, False), ("cuda", 5, False), ("cuda", SMALL, True), ("tpu", 5, True)],
)
@pytest.mark.parametrize("entries", [None, 1, 3])
def test_accelerators_scatter_into_large_states(platform: str, slots: int, scatters: bool, entries: int | None) -> None:
    """A pass for several entries would be no part of another kernel of a GPU."""
    x = jax.ShapeDtypeStruct((3, 2, 4, slots) if entries is None else (3, 2, slots, 4), jnp.float32)
    if entries is None:
        traced = jax.jit(lambda x, at: set_slot(x, at, 0)).trace(x, jnp.zeros((3, 2), jnp.int32))
    else:
        new = jnp.ones((3, 2, entries, 4))
        traced = jax.jit(set_entries).trace(x, jnp.zeros((3, entries), jnp.int32), new)
    scatters |= platform == "cuda" and (entries or 1) > 1
    assert ("stablehlo.scatter" in traced.lower(lowering_platforms=(platform,)).as_text()) == scatters
