"""Codes of 2, 4 and 8 bits against NumPy, and what follows of their definition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from kvjax.cache import Slots
from kvjax.methods.zipcache.coded import CodedEntries
from kvjax.methods.zipcache.codes import Codes, packed, unpacked
from tests.methods.literal_codes import literal_codes

RNG = np.random.default_rng(0)
B, H, T, D = 2, 3, 7, 16

coded = partial(jax.jit, static_argnames=("bits", "axis", "dtype"))(Codes.of)
numbers = jax.jit(Codes.numbers)
plain = jax.jit(CodedEntries.plain)


@jax.jit
def in_two_parts(entries: Slots, first: Array, others: Array) -> CodedEntries:
    return CodedEntries.of(entries, [(4, first), (2, others)])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_hold_channels_that_lie_a_part_of_the_head_apart(bits: int) -> None:
    """The first byte of 2-bit codes has the channels 0, D/4, D/2 and 3D/4, from its lowest bits."""
    codes = RNG.integers(0, 2**bits, (T, D)).astype(np.uint8)
    whole = np.asarray(jax.jit(packed, static_argnums=1)(codes, bits))
    assert whole.shape == (T, D * bits // 8)
    for c in range(D):
        byte, place = c % (D * bits // 8), c // (D * bits // 8)
        np.testing.assert_array_equal(whole[:, byte] >> (place * bits) & (2**bits - 1), codes[:, c])
    np.testing.assert_array_equal(jax.jit(unpacked, static_argnums=1)(whole, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [2, 3])
def test_codes_are_those_worked_out_by_hand(bits: int, axis: int) -> None:
    """A range in which all numbers are equal, ties, empty slots with large numbers, and a head without entries."""
    x = RNG.normal(size=(B, H, T, D)).astype(np.float32) * 10.0 ** RNG.integers(-3, 4, (B, H, 1, D)).astype(np.float32)
    x[0, 0] = 3.25
    x[0, 1, 0] = np.arange(D) % 5 * (2**bits - 1) / 4  # steps of 1 and ties, from 0
    x[0, 1, 1:] = x[0, 1, :1]
    real = RNG.random((B, H, T, 1)) < 0.7
    real[0], real[1, 2] = True, False
    x = np.where(real, x, 1e6).astype(np.float32)
    got = coded(x, bits=bits, axis=axis, real=real, dtype=jnp.dtype("float32"))
    codes, low, step = literal_codes(x, bits, axis, real)
    np.testing.assert_array_equal(got.low, low)
    np.testing.assert_allclose(got.step, step, rtol=1e-6)
    np.testing.assert_array_equal(unpacked(got.codes, bits), codes)
    assert np.all(np.abs(numbers(got) - (low + step * codes)) <= 1e-6 * (np.abs(low) + step * codes))
    np.testing.assert_array_equal(numbers(got)[0, 0], x[0, 0])
    assert not np.asarray(numbers(got)[1, 2]).any()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([2, 4, 8]),
    axis=st.sampled_from([2, 3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    offset=st.sampled_from([0.0, 50.0]),
)
def test_no_number_is_further_off_than_half_a_step(seed: int, bits: int, axis: int, dtype: str, offset: float) -> None:
    """And no further than low and step are rounded: in bfloat16 to 2^-9 of themselves."""
    rng = np.random.default_rng(seed)
    x = rng.normal(offset, 10.0 ** rng.integers(-2, 3), (B, H, T, D))
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    real = rng.random((B, H, T, 1)) < 0.8
    got = coded(x, bits=bits, axis=axis, real=real, dtype=jnp.dtype(dtype))
    assert got.low.dtype == got.step.dtype == dtype
    low, step = (np.asarray(part.astype(jnp.float32)) for part in (got.low, got.step))
    rounding = 2.0**-9 if dtype == "bfloat16" else 2.0**-23
    bound = step / 2 + rounding * (2**bits * step + 2 * np.abs(low))
    off = np.abs(np.asarray(numbers(got)) - x)
    assert np.all((off <= bound) | ~real)
    if axis == 2:  # the smallest number of a channel is one of dtype, so it comes back as it was
        smallest = np.where(real, x, np.inf).min(axis=2)
        found = np.where(real, numbers(got), np.inf).min(axis=2)
        np.testing.assert_array_equal(found, smallest)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 64.0, 0.0]))
def test_entries_with_more_bits_are_nearer(seed: int, scale: float) -> None:
    """Divisors keep one channel of the values, 64 times as large as others, from making these coarse; zeros do not."""
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, B, H, 40, D)).astype(np.float32)
    values[..., 3] *= scale
    entries = Slots(keys, values, np.broadcast_to(np.arange(40, dtype=np.int32), (B, H, 40)), np.full((B, H), 40))
    index = np.broadcast_to(rng.permutation(40).astype(np.int32), (B, H, 40))
    first, others = index[..., :20], index[..., 20:]
    got = in_two_parts(entries, first, others)
    np.testing.assert_array_equal(got.positions, index)
    for found, x in zip(plain(got), (keys, values), strict=True):
        off = np.abs(np.asarray(found) - np.take_along_axis(x, index[..., None], axis=2))
        assert np.isfinite(off).all()
        off[..., 3] = 0
        assert 3 * off[:, :, :20].mean() < off[:, :, 20:].mean()
    real = np.ones((B, H, 40, 1), bool)
    undivided = np.abs(numbers(coded(values, bits=2, axis=3, real=real, dtype=values.dtype)) - values)
    assert scale != 64 or 2 * off[:, :, 20:].mean() < np.delete(undivided, 3, axis=-1).mean()
