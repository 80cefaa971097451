"""CORM against its counting written out in float64 NumPy, one head of one text at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.parts import Slots
from kvjax.policies import parse
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=5,recent=2,every=3", "budget=0.5,window=40,recent=3,every=None")

BUDGET, RECENT = 14, 3


class Head:
    """One kv head: the tokens it holds, the queries that voted for each, and the last query's weights."""

    def __init__(self, window):
        self.window, self.keys, self.votes, self.weights, self.closest = window, {}, {}, {}, np.inf

    def see(self, position, q, k):
        self.keys[position], self.votes[position] = rotated(k, position, 1e4), set()
        queries = rotated(q, position, 1e4)
        weights = softmax(queries @ np.stack(list(self.keys.values())).T / np.sqrt(k.shape[-1])).mean(axis=0)
        self.weights = dict(zip(self.keys, weights, strict=True))
        if position:
            self.closest = min(self.closest, abs(weights * len(weights) - 1).min())
        for token, weight in self.weights.items():
            if not position or weight >= 1 / len(self.keys):
                self.votes[token].add(position)

    def evict(self, now, count):
        """Of the tokens that are not recent, those with the fewest votes go; of equal ones that of the least weight."""

        def rank(p):
            return len([r for r in self.votes[p] if r >= now - self.window]), self.weights[p]

        old = sorted((p for p in self.keys if p < now - RECENT), key=rank)
        for p in old[: max(count, 0)]:
            del self.keys[p], self.votes[p], self.weights[p]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "window", "every"), [(4, 40, 1), (1, 6, 1), (7, 6, 4)])
def test_is_the_literal_count(group, window, every):
    """Prompts longer and shorter than the budget and the window, one shorter than what is protected; 14 steps."""
    heads, size, steps, lengths = 2, 26, 14, np.array([26, 12, 2])
    policy = parse(f"corm:budget={BUDGET},window={window},recent={RECENT},every={every}")
    q, k, v = one_layer.random_streams(group, 3, heads, group, size + steps)
    literal = [[Head(window) for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-5


@pytest.mark.long
def test_votes_come_first_then_the_last_weight():
    """Bits of queries at any place count alike: 3, 1, 1, 0 and 2 votes."""
    policy = parse("corm:budget=3,window=40,recent=0")
    votes = jnp.array([[0b111, 0b1, 0, 0, 1 << 31], [0, 0, 0b1, 0, 0b1]], jnp.uint32)[None, None]
    weight = jnp.array([[[0.0, 1e-7, 2e-7, 1.0, 0.1]]])
    entries = one_layer.entries_at([[0, 1, 2, 3, 4]])
    entries = Slots(entries.keys, entries.values, entries.positions, jnp.array([[3]]), (votes, weight))
    scores = policy.score(entries, one_layer.moment(5))[0, 0]
    assert np.argsort(scores).tolist() == [3, 1, 2, 4, 0]
    assert policy.compress(entries, one_layer.moment(5), 3).positions[0, 0].tolist() == [0, 2, 4]
