"""Leverage against its definition in float64 NumPy: exact with a wide sketch, through the sketch with a narrow one."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.models import AttentionLayer, Rope
from kvjax.models.rope import YarnScaling
from kvjax.parts import LeverageScore
from kvjax.policy import Moment
from tests import tiny
from tests.methods.reference import rotated

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,sketch=6,sinks=1,recent=2",)

HEADS, DIM, SLOTS, LENGTHS = 2, 8, 40, (40, 23, 5)


def drawn(turn, seed=0):
    """Keys before RoPE by row, head and position, and entries that hold them rotated, in any order of slots."""
    rng = np.random.default_rng(seed)
    keys = np.zeros((len(LENGTHS), HEADS, SLOTS, DIM), np.float32)
    positions = np.full((len(LENGTHS), HEADS, SLOTS), -1)
    texts = [[30 * rng.normal(size=(n, DIM)) @ rng.normal(size=(DIM, DIM)) for _ in range(HEADS)] for n in LENGTHS]
    for row, head in np.ndindex(len(LENGTHS), HEADS):
        order = rng.permutation(SLOTS)[: LENGTHS[row]]
        positions[row, head, order] = np.arange(LENGTHS[row])
        keys[row, head, order] = [turn(x, p) for p, x in enumerate(texts[row][head])]
    entries = Slots(jnp.asarray(keys), jnp.asarray(keys), jnp.asarray(positions), jnp.zeros((len(LENGTHS), HEADS)))
    return texts, entries, positions


def moment(rope, index=0):
    layer = AttentionLayer(index, rope, None, 1.0, jnp.zeros((HEADS, DIM, 1)))
    return Moment(jnp.array(LENGTHS), layer)


def leverage(x, ridge):
    x = x - x.mean(axis=0)
    return np.einsum("nd,de,ne->n", x, np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1])), x)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("attention_factor", [1.0, 1.4])
def test_a_wide_sketch_is_exact_leverage_before_rope(attention_factor):
    """A Gaussian matrix with as many columns as the head has channels keeps the column space, whatever its numbers."""
    rope = Rope(1e4)
    if attention_factor != 1:
        rope = Rope(1e4, YarnScaling(1.0, attention_factor, 32.0, 1.0, True, 4096))
    texts, entries, positions = drawn(lambda x, p: attention_factor * rotated(x, p, 1e4))
    scores = np.asarray(LeverageScore(sketch=48)(entries, moment(rope)))
    for row, head in np.ndindex(len(LENGTHS), HEADS):
        own, text = scores[row, head], texts[row][head]
        by_position = own[np.argsort(positions[row, head])][SLOTS - len(text) :]
        fewer = np.full(len(text), 1 - 1 / len(text))  # fewer tokens than channels span all directions but the mean
        expected = leverage(text, 0) if len(text) > DIM else fewer
        np.testing.assert_allclose(by_position, expected, atol=2e-3)
        assert (own[positions[row, head] < 0] == 0).all()


def test_a_narrow_sketch_is_leverage_of_what_it_sees():
    texts, entries, positions = drawn(lambda x, p: rotated(x, p, 1e4))
    score, here = LeverageScore(sketch=3, seed=7), moment(Rope(1e4), index=2)
    gaussian = np.asarray(score.gaussian(entries, here), np.float64)
    scores = np.asarray(score(entries, here))
    for row, head in np.ndindex(len(LENGTHS), HEADS):
        by_position = scores[row, head][np.argsort(positions[row, head])][SLOTS - LENGTHS[row] :]
        np.testing.assert_allclose(by_position, leverage(texts[row][head] @ gaussian[head], 1e-2), atol=1e-3)
    bits = 2 * np.frexp(scores[scores > 0])[0] * 2**12  # the leading 1 and 12 more
    np.testing.assert_array_equal(bits, np.round(bits))
    assert (bits % 2).any()


def test_the_sketch_is_gaussian_and_belongs_to_seed_layer_and_head():
    keys = SimpleNamespace(keys=np.zeros((1, 4, 1, 64)))
    layers = [LeverageScore(48, seed).gaussian(keys, moment(Rope(1e4), i)) for seed, i in ((0, 0), (0, 1), (1, 0))]
    draws = np.stack(layers).reshape(12, -1)
    assert abs(draws.mean()) < 5 * (48 * draws.size) ** -0.5
    np.testing.assert_allclose(draws.var(axis=1), 1 / 48, rtol=0.15)
    correlations = np.corrcoef(draws)
    assert np.abs(correlations - np.eye(12)).max() < 0.1


def test_the_preset_retains_the_highest_leverage():
    """Of keys that the model makes, beside a sink and two recent tokens."""
    params, (row,) = tiny.decoder(), [np.random.default_rng(2).integers(0, tiny.VOCAB, 30)]
    seen = []

    def attend(layer, q, k, v, cache):
        seen.append(np.asarray(k[0], np.float64))
        return q, cache

    params(row[None], attend)
    _, cache = tiny.prefill(params, "leverage_score:budget=12,sinks=1,recent=2", [row], 32)
    for head, held in enumerate(tiny.held(cache, 0)[0]):
        scores = leverage(seen[0][head] @ np.eye(8), 0)
        between = sorted(range(1, 28), key=lambda p: -scores[p])
        assert held == sorted([0, *between[:9], 28, 29])


def test_keys_that_are_equal_before_rope_tie():
    """As those of equal tokens in the first layer, wherever they stand."""
    rng = np.random.default_rng(3)
    text = np.tile(rng.normal(size=(10, DIM)), (3, 1))
    keys = np.stack([rotated(x, p, 1e4) for p, x in enumerate(text)]).astype(np.float32)[None, None]
    entries = Slots(jnp.asarray(keys), jnp.asarray(keys), jnp.arange(30)[None, None], jnp.zeros((1, 1)))
    scores = np.asarray(LeverageScore()(entries, moment(Rope(1e4))))[0, 0]
    np.testing.assert_array_equal(scores[:10], scores[10:20])
    np.testing.assert_array_equal(scores[:10], scores[20:])
    assert len(set(scores)) == 10
