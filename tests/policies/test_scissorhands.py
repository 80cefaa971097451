"""Scissorhands against its counting written out, one head of one text at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import decoding, reading
from kvjax.cache import KVCache
from kvjax.models import AttentionLayer, DecoderConfig, Rope
from kvjax.policies import parse
from tests.policies.reference import rotated, softmax

DIM = 8


class Head:
    """One kv head: the tokens it holds, and for each the queries that gave it less than the mean."""

    def __init__(self, budget, window, recent, drop):
        self.budget, self.window, self.recent, self.every = budget, window, recent, int(budget * drop)
        self.keys, self.low = {}, {}

    def see(self, position, q, k):
        self.keys[position], self.low[position] = rotated(k, position, 1e4), set()
        held = sorted(self.keys)
        logits = rotated(q, position, 1e4) @ np.stack([self.keys[p] for p in held]).T / DIM**0.5
        for p, weight in zip(held, softmax(logits).mean(axis=0), strict=True):
            if weight < 1 / len(held):
                self.low[p].add(position)

    def evict(self, now, count):
        """Of the tokens that are not recent, those with the largest counts go; of equal ones the later."""
        counts = {p: len([r for r in low if r >= now - self.window]) for p, low in self.low.items()}
        old = sorted((p for p in self.keys if p < now - self.recent), key=lambda p: (-counts[p], -p))
        for p in old[:count]:
            del self.keys[p], self.low[p]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [5, 40])
def test_is_the_literal_count(group, window):
    """Prompts longer and shorter than the budget and the window, and steps through two evictions."""
    rng = np.random.default_rng(group + window)
    heads, size, steps, lengths = 2, 48, 16, (48, 30, 13)
    policy = parse(f"scissorhands:budget=24,window={window},recent=4,drop=0.25")
    config = DecoderConfig("llama", 9, 8, 8, 2 * group, heads, DIM, (None,), Rope(1e4), 256)
    layer = AttentionLayer(0, Rope(1e4), None, DIM**-0.5, jnp.zeros((2 * group, DIM, 8)))
    q = rng.normal(size=(3, 2 * group, size + steps, DIM)).astype(np.float32)
    k, v = (rng.normal(size=(3, heads, size + steps, DIM)).astype(np.float32) for _ in range(2))
    literal = [[Head(24, window, 4, 0.25) for _ in range(heads)] for _ in lengths]
    ends = jnp.array(lengths)
    positions = np.arange(size) - (size - np.array(lengths))[:, None]
    attend = reading(
        policy, jnp.where(positions < 0, -1, positions), ends, ends, slots=[24], kept=[24], compress=True, final=True
    )
    empty = KVCache.empty(config, policy, ends, size, np.float32)
    _, layers = attend(layer, q[:, :, :size], k[:, :, :size], v[:, :, :size], empty.layers)

    def assert_same():
        for row, heads_of_row in enumerate(literal):
            for held, head in zip(np.asarray(layers[0].positions[row]), heads_of_row, strict=True):
                assert sorted(held[held >= 0].tolist()) == sorted(head.keys)

    for row, length in enumerate(lengths):
        for h, head in enumerate(literal[row]):
            for p in range(length):
                at = size - length + p
                head.see(p, q[row, h * group : (h + 1) * group, at], k[row, h, at])
            head.evict(length, max(0, length - 24))
    assert_same()
    for t in range(steps):
        for row, length in enumerate(lengths):
            for h, head in enumerate(literal[row]):
                if len(head.keys) >= 24:
                    head.evict(length + t, head.every)
                head.see(length + t, q[row, h * group : (h + 1) * group, size + t], k[row, h, size + t])
        at = slice(size + t, size + t + 1)
        step = decoding(policy, ends + t, jnp.ones(3, bool))
        _, layers = step(layer, q[:, :, at], k[:, :, at], v[:, :, at], layers)
        assert_same()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("budget=0.5", "budget=0.5: accepted is an integer"),
        ("drop=0", "drop=0: accepted is a share"),
        ("drop=1.5", "drop=1.5: accepted is a share"),
        ("window=0", "window=0"),
        ("budget=16,recent=10", "a budget of 16 entries is smaller"),
    ],
)
def test_what_makes_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        parse(f"scissorhands:{options}")
