"""Observed attention in a step, in a sliding window and per query group; tests/methods/test_kvpress.py has prompts."""

from __future__ import annotations

import numpy as np

from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import attended, rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,sinks=1,recent=2,every=3",)


def test_old_tokens_have_no_advantage():
    """The sum of H2O divided by the number of queries, of the first layer of a model."""
    params, (row,) = tiny.decoder(), [np.random.default_rng(2).integers(0, tiny.VOCAB, 30)]
    _, cache = tiny.prefill(params, "observed_attention:budget=12,sinks=1,recent=2", [row], 32)
    sums = attended(params, row)[2]
    for head, held in enumerate(tiny.held(cache, 0)[0]):
        means = sums[head] / np.arange(30, 0, -1)
        assert held == sorted([0, *sorted(range(1, 28), key=lambda p: -means[p])[:9], 28, 29])


class Head:
    """One kv head with its query heads: the keys it holds, and the sum of the weights that each has received."""

    def __init__(self):
        self.keys, self.sums = {}, {}

    def see(self, position, q, k):
        self.keys[position] = rotated(k, position, 1e4)
        queries = rotated(q, position, 1e4)
        weights = softmax(queries @ np.stack(list(self.keys.values())).T / np.sqrt(k.shape[-1])).mean(axis=0)
        for token, weight in zip(self.keys, weights, strict=True):
            self.sums[token] = self.sums.get(token, 0) + weight

    def evict(self, now, count):
        ranked = sorted((p for p in self.keys if p < now - 1), key=lambda p: self.sums[p] / (now - p))
        for p in ranked[: max(count, 0)]:
            del self.keys[p], self.sums[p]


def test_steps_evict_the_smallest_mean():
    """Rows of different lengths, two heads of three query heads each, one eviction in each of 12 steps."""
    heads, group, size, steps, lengths = 2, 3, 16, 12, np.array([16, 9, 3])
    policy = parse("observed_attention:budget=8,recent=1,every=1")
    q, k, v = one_layer.random_streams(5, 3, heads, group, size + steps)
    literal = [[Head() for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)


def test_a_sliding_window_counts_its_queries_only():
    """A token that all queries of its window gave a half has the mean of a half, however long ago it came."""
    policy = parse("observed_attention:budget=4")
    entries = one_layer.entries_at([[0, 5, 9]], per_slot=[[1.0, 2.0, 0.5]])
    scores = policy.score(entries, one_layer.moment(10, window=4))
    np.testing.assert_allclose(scores, [[[1 / 4, 2 / 4, 0.5]]])
