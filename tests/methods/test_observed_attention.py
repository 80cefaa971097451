"""Observed attention in a step, in a sliding window and per query group; tests/methods/test_kvpress.py has prompts."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import attended, rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,sinks=1,recent=2,every=3",)


@pytest.mark.slow
def test_old_tokens_have_no_advantage():
    """The sum of H2O divided by the number of queries, of the first layer of a model."""
    params, (row,) = tiny.decoder(), [np.random.default_rng(2).integers(0, tiny.VOCAB, 30)]
    _, cache = tiny.prefill(params, "observed_attention:budget=12,sinks=1,recent=2", [row], 32)
    sums = attended(params, row)[2]
    for head, held in enumerate(tiny.held(cache, 0)[0]):
        means = sums[head] / np.arange(30, 0, -1)
        assert held == sorted([0, *sorted(range(1, 28), key=lambda p: -means[p])[:9], 28, 29])


@pytest.mark.slow
def test_steps_evict_the_smallest_mean():
    """Rows of different lengths, two heads of three query heads each, one eviction in each of 12 steps."""
    heads, group, size, steps, lengths = 2, 3, 16, 12, np.array([16, 9, 3])
    policy = parse("observed_attention:budget=8,recent=1,every=1")
    q, k, v = one_layer.random_streams(5, 3, heads, group, size + steps)
    _, entries = one_layer.read(policy, lengths, size, q, k, v)
    sums = [[{} for _ in range(heads)] for _ in lengths]
    keys = [[{} for _ in range(heads)] for _ in lengths]

    def see(row, h, p, at):
        own = keys[row][h]
        own[p] = rotated(k[row, h, at], p, 1e4)
        queries = rotated(q[row, h * group : (h + 1) * group, at], p, 1e4)
        weights = softmax(queries @ np.stack(list(own.values())).T / np.sqrt(8)).mean(axis=0)
        for token, weight in zip(own, weights, strict=True):
            sums[row][h][token] = sums[row][h].get(token, 0) + weight

    def evict(row, h, now, count):
        ranked = sorted((p for p in keys[row][h] if p < now - 1), key=lambda p: sums[row][h][p] / (now - p))
        for p in ranked[: max(count, 0)]:
            del keys[row][h][p], sums[row][h][p]

    for row, h in np.ndindex(3, heads):
        for p in range(lengths[row]):
            see(row, h, p, size - lengths[row] + p)
        evict(row, h, lengths[row], lengths[row] - 8)
    for t in range(steps):
        for row, h in np.ndindex(3, heads):
            evict(row, h, lengths[row] + t, len(keys[row][h]) - 7)
            see(row, h, lengths[row] + t, size + t)
        at = slice(size + t, size + t + 1)
        _, entries = one_layer.step(policy, lengths + t, entries, q[:, :, at], k[:, :, at], v[:, :, at])
        for row in range(3):
            assert one_layer.held(entries, row) == [sorted(own) for own in keys[row]]


def test_a_sliding_window_counts_its_queries_only():
    """A token that all queries of its window gave a half has the mean of a half, however long ago it came."""
    policy = parse("observed_attention:budget=4")
    entries = one_layer.entries_at([[0, 5, 9]], per_slot=[[1.0, 2.0, 0.5]])
    scores = policy.score(entries, one_layer.moment(10, window=4))
    np.testing.assert_allclose(scores, [[[1 / 4, 2 / 4, 0.5]]])
