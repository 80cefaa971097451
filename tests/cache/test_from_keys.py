"""Values that keys contain: no arrays, and the same entries as with the values apart."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import FromKeys, Slots
from kvjax.cache.from_keys import for_attention, in_arrays
from kvjax.pallas_kernels import QuantizedArray, plain

FIRST, SIZE = 4, 12
KEYS = np.random.default_rng(0).normal(size=(2, 1, 6, SIZE)).astype(np.float32)


def test_values_are_the_last_channels_behind_zeros():
    values = np.concatenate([np.zeros((2, 1, 6, FIRST)), KEYS[..., FIRST:]], axis=-1)
    np.testing.assert_array_equal(FromKeys(FIRST).of(jnp.asarray(KEYS)), values)
    assert jax.tree.leaves(FromKeys(FIRST)) == []


@pytest.mark.parametrize("stored", [jnp.asarray, lambda x: QuantizedArray.of(jnp.asarray(x), 8, FIRST)])
def test_arrays_of_stored_keys(stored):
    held = stored(KEYS)
    keys, values = in_arrays(held, FromKeys(FIRST))
    np.testing.assert_array_equal(keys, plain(held))
    np.testing.assert_array_equal(values, plain(stored(np.where(np.arange(SIZE) < FIRST, 0, KEYS))))
    assert for_attention(held, FromKeys(FIRST)) == (held, held)
    assert for_attention(held, values) == (held, values)


def test_entries_change_as_with_values_apart():
    at = jnp.broadcast_to(jnp.arange(6), (2, 1, 6))
    once = Slots(jnp.asarray(KEYS), FromKeys(FIRST), at, jnp.full((2, 1), 9))
    apart = once.plain()
    new = tuple(jnp.ones((2, 1, SIZE)) * x for x in (1, jnp.arange(SIZE) >= FIRST))
    for change in (
        lambda x, _: x.gather(jnp.array([[[3, -1, 5]]] * 2)),
        lambda x, _: x.append(x).grow(16).trim(13),
        lambda x, value: x.write(jnp.array([[2], [6]]), new[0], value, jnp.array([[7], [7]])),
        lambda x, _: x.grow(8).insert(x.trim(2), replace(x.append(x.trim(2)), keys=None, values=None)),
        lambda x, _: x.updated(before := x.plain(), replace(before, keys=before.keys.at[..., :FIRST].add(1))),
    ):
        ours, theirs = jax.jit(change)(once, FromKeys(FIRST)), jax.jit(change)(apart, new[1])
        assert ours.values == FromKeys(FIRST)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(Slots.plain)(ours), theirs)
