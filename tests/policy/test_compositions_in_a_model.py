"""Compositions that no preset has, in a model: prompts beyond the budget and within it, and a few tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.parts import (
    AccumulatedAttention,
    Chunks,
    DenseLayers,
    Drop,
    EvenChunks,
    ExpectedAttention,
    Fixed,
    FoldedWindow,
    GaussianMerge,
    Newest,
    Pooling,
    Pyramid,
    Representatives,
    TopTokens,
    ValueMerge,
    WindowAttention,
)
from kvjax.policy import Moment, Policy
from tests import tiny
from tests.policy.compositions import MEAN, PROTECT
from tests.policy.literal_allocation import RECENT, SINKS
from tests.policy.literal_selection import after_eviction, after_prompt

SIZE = 24
PYRAMID = Pyramid(Fixed(12), 4, 2)
SAMPLES = {
    "cam over chunks, by representatives": Policy(
        AccumulatedAttention(),
        Fixed(12),
        Representatives(Chunks(TopTokens(), 5), 0.5),
        ValueMerge(tokens=3),
        PROTECT,
        1,
    ),
    "kvcrush on pyramidkv": Policy(
        WindowAttention(4, MEAN, Pooling("max", 3)), PYRAMID, Representatives(TopTokens(), 0.5), Drop(), PROTECT
    ),
    "kvmerger behind pyramidkv": Policy(
        ExpectedAttention(sinks=2, future=4), PYRAMID, EvenChunks(chunk=5), GaussianMerge(heavy=1, theta=None), PROTECT
    ),
    "even chunks under morphkv": Policy(
        FoldedWindow(4, 2, MEAN, ahead=True),
        DenseLayers(Fixed(12), 1),
        EvenChunks(chunk=5),
        Drop(),
        PROTECT,
        4,
    ),
    "kvmerger with the newest tokens": Policy(
        AccumulatedAttention(), Fixed(12), Newest(), GaussianMerge(heavy=1, theta=None), PROTECT, 2
    ),
}


@partial(jax.jit, static_argnums=(0, 1))
def ranked(policy, layer: int, params, entries, length):
    counts = jnp.minimum(entries.capacity, entries.slots)
    return policy.rank(entries, Moment(length, params.attention_layers[layer]), counts, raised=False)


def scored(cache, params, layer: int, row: int) -> list[tuple]:
    """(keys, scores) of each head of a row by position, as the policy's score judges the entries."""
    entries = cache.entries[layer]
    scores = np.asarray(ranked(cache.policy, layer, params, entries, cache.length))[row]
    keys, positions = np.asarray(entries.keys)[row], np.asarray(entries.positions)[row]
    heads = []
    for own_keys, own_scores, own in zip(keys, scores, positions, strict=True):
        there = np.flatnonzero(own >= 0)
        heads.append(tuple({int(own[i]): x[i] for i in there} for x in (own_keys, own_scores)))
    return heads


def must_stay(length: int) -> set[int]:
    return set(range(min(SINKS, length))) | set(range(max(0, length - RECENT), length))


def after_reading(policy, params, full, layer: int, row: int, length: int) -> list[set[int]]:
    """The literal composition after the prompt, given the cache of a prompt that is not compressed."""
    if not policy.limited(layer):
        return [set(range(length))] * params.config.num_kv_heads
    keys, scores = zip(*scored(full, params, layer, row), strict=True)
    counts = [int(n) for n in full.entries[layer].capacity[row]]
    return after_prompt(policy.select, policy.merge, keys, scores, must_stay(length), counts)


def after_step(policy, params, cache, layer: int, row: int) -> list[set[int]]:
    """The literal composition after one more token."""
    now, heads = int(cache.length[row]), []
    held = tiny.held(cache, row)[layer]
    if not policy.evicts(layer, len(cache.entries)):
        return [{*own, now} for own in held]
    capacity = int(cache.entries[layer].capacity[row, 0])
    for keys, scores in scored(cache, params, layer, row):
        left = set(scores)
        if len(left) >= capacity:
            stay = must_stay(now)
            left = after_eviction(policy.select, policy.merge, keys, scores, stay, capacity, policy.every)
        heads.append({*left, now})
    return heads


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_few_run_through_a_model(name):
    """A prompt within the budget gives full attention; every row retains what the literal composition does."""
    policy, rng, steps = SAMPLES[name], np.random.default_rng(1), 3
    layers = 1 if isinstance(policy.budget, Fixed) else 2
    params = tiny.decoder(windows=(None,) * layers)
    lengths = (24, 5, 15)
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in lengths], rng.integers(0, tiny.VOCAB, (steps, 3))
    compares = not (isinstance(policy.select, Representatives) and isinstance(policy.select.base, Chunks))
    full = tiny.prefill(params, policy, rows, SIZE, compress="never")[1] if compares else None
    logits, cache = tiny.prefill(params, policy, rows, SIZE, room=steps)
    expected = tiny.full_logits(params, [np.append(r, t) for r, t in zip(rows, tokens.T, strict=True)], SIZE + steps)
    np.testing.assert_allclose(logits[1], expected[1][4], atol=2e-5)
    for row, length in enumerate(lengths):
        for layer, held in enumerate(tiny.held(cache, row)):
            if compares:
                assert list(map(set, held)) == after_reading(policy, params, full, layer, row, length)
            most = policy.slots(layer, SIZE, layers)
            assert all(must_stay(length) <= set(own) for own in held)
            assert all(len(own) == min(length, most or SIZE) or policy.merge.effects.at_prompt for own in held)
    for i, token in enumerate(tokens):
        before, (logits, cache) = cache, tiny.step(params, cache, token, np.ones(3, bool))
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[1], expected[1][5 + i], atol=2e-5)
        for row in range(3):
            for layer, held in enumerate(tiny.held(cache, row)):
                assert list(map(set, held)) == after_step(policy, params, before, layer, row)
