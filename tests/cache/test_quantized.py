"""Codes and scales against their definition in NumPy, token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import Slots
from kvjax.pallas_kernels import QuantizedArray

RNG = np.random.default_rng(0)
B, H, S, D = 2, 3, 5, 16
BITS_AND_GROUPS = [(8, 4), (8, 16), (4, 4), (4, 2)]

quantized = partial(jax.jit, static_argnums=(1, 2))(QuantizedArray.of)
dequantized = jax.jit(QuantizedArray.dequantized)
plain = jax.jit(Slots.plain)


def by_hand(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., D] and scales [..., D/group] in float64; a scale is rounded as bfloat16 is."""
    largest = 2 ** (bits - 1) - 1
    codes, scales = np.zeros(x.shape, int), np.zeros((*x.shape[:-1], x.shape[-1] // group))
    for index in np.ndindex(scales.shape):
        channels = (*index[:-1], slice(index[-1] * group, (index[-1] + 1) * group))
        top = np.float32(np.abs(x[channels]).max()) / np.float32(largest)
        scales[index] = float(top.astype(jnp.bfloat16))
        if scales[index]:
            codes[channels] = np.clip(np.round(x[channels].astype(np.float64) / scales[index]), -largest, largest)
    return codes, scales


@pytest.mark.parametrize(("bits", "group"), BITS_AND_GROUPS)
def test_codes_and_scales_are_those_worked_out_by_hand(bits: int, group: int) -> None:
    x = RNG.normal(size=(S, D)).astype(np.float32) * 10.0 ** RNG.integers(-3, 4, (S, 1)).astype(np.float32)
    x[0] = 0
    x[1, :group] = np.float32(2 ** (bits - 1) - 1) * np.linspace(-1, 1, group, dtype=np.float32)
    x[1, 0], x[1, 1] = 2 ** (bits - 1) - 1, 2.5  # a tie, with a scale of 1
    got = quantized(x, bits, group)
    codes, scales = by_hand(x, bits, group)
    np.testing.assert_array_equal(np.asarray(got.scales).astype(np.float32), scales.astype(np.float32))
    if bits == 8:
        np.testing.assert_array_equal(got.codes, codes)
    else:
        np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8) & 15, codes[:, : D // 2] & 15)
        np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8) >> 4, codes[:, D // 2 :] & 15)
    expected = codes * np.repeat(scales, group, axis=-1)
    np.testing.assert_array_equal(dequantized(got), expected.astype(np.float32))
    assert float(dequantized(got)[1, 1]) == 2
    assert got.shape == x.shape
    assert got.dtype == np.float32


@pytest.mark.parametrize(("bits", "group"), BITS_AND_GROUPS)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30), outlier=st.floats(1, 1000))
def test_no_number_is_further_off_than_half_a_scale(bits, group, seed, exponent, outlier) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(S, D)) * 2.0**exponent).astype(np.float32)
    x[:, rng.integers(D)] *= np.float32(outlier)
    got = quantized(x, bits, group)
    off = np.abs(x - np.asarray(dequantized(got))).reshape(S, -1, group)
    scales = np.asarray(got.scales).astype(np.float32)[..., None]
    assert (off <= scales / 2 * (1 + 1e-6)).all()
    assert (
        scales <= np.abs(x).reshape(S, -1, group).max(-1, keepdims=True) / (2 ** (bits - 1) - 1) * (1 + 2**-8)
    ).all()


def test_the_dtype_comes_back() -> None:
    x = jnp.asarray(RNG.normal(size=(S, D)), jnp.bfloat16)
    got = quantized(x, 8, 4)
    assert dequantized(got).dtype == got.dtype == jnp.bfloat16
    np.testing.assert_allclose(dequantized(got).astype(jnp.float32), x.astype(jnp.float32), rtol=2**-6, atol=0.05)


def layer(bits: int) -> Slots:
    keys, values = (quantized(RNG.normal(size=(B, H, S, D)).astype(np.float32), bits, 4) for _ in range(2))
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (B, H, S))
    return Slots(keys, values, positions, np.full((B, H), S, np.int32))


def assert_equal_but(entries: Slots, other: Slots, slots: np.ndarray) -> None:
    """Codes, scales and positions are the same bit for bit in all slots but these [B, H, S]."""
    leaves = (jax.tree.leaves((x.keys, x.values)) for x in (entries, other))
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[~slots], np.asarray(two)[~slots])
    np.testing.assert_array_equal(np.asarray(entries.positions)[~slots], np.asarray(other.positions)[~slots])


@pytest.mark.parametrize("bits", [8, 4])
def test_overwriting_a_slot_leaves_the_others_bit_for_bit(bits: int) -> None:
    entries = layer(bits)
    slot = RNG.integers(0, S, (B, H))
    new = [RNG.normal(size=(B, H, D)).astype(np.float32) * 100 for _ in range(2)]
    key, value = (quantized(x, bits, 4) for x in new)
    written = jax.jit(Slots.write)(entries, slot, key, value, np.full((B, H), 99))
    at = slot[..., None] == np.arange(S)
    assert_equal_but(written, entries, at)
    for held, x in ((plain(written).keys, new[0]), (plain(written).values, new[1])):
        np.testing.assert_array_equal(
            np.asarray(held)[at], np.asarray(dequantized(quantized(x, bits, 4))).reshape(-1, D)
        )
    assert (np.asarray(written.positions)[at] == 99).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_part_changes_is_quantised_anew_and_nothing_else(bits: int) -> None:
    entries = layer(bits)
    shown = plain(entries)
    at = RNG.random((B, H, S)) < 0.4
    add = np.where(at[..., None], RNG.normal(size=(B, H, S, D)), 0).astype(np.float32)
    changed = entries.updated(shown, replace(shown, values=shown.values + add))
    assert changed.keys is entries.keys
    assert_equal_but(changed, entries, at)
    expected = dequantized(quantized(np.asarray(shown.values) + add, bits, 4))
    np.testing.assert_array_equal(np.asarray(plain(changed).values)[at], np.asarray(expected)[at])
    assert (np.abs(np.asarray(plain(changed).values - shown.values))[at].max(-1) > 0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_slots_move_with_their_scales(bits: int) -> None:
    entries = layer(bits)
    values = np.asarray(plain(entries).values)
    index = np.stack([RNG.permutation(S)[:3] for _ in range(B * H)]).reshape(B, H, 3)
    index[..., 1] = -1
    taken = jax.jit(lambda entries, index: entries.gather(index).grow(6).append(entries))(entries, index)
    got = np.asarray(plain(taken).values)
    for b, h in np.ndindex(B, H):
        np.testing.assert_array_equal(got[b, h, [0, 2]], values[b, h, index[b, h, [0, 2]]])
        np.testing.assert_array_equal(got[b, h, [1, 3, 4, 5]], 0)
        np.testing.assert_array_equal(got[b, h, 6:], values[b, h])
