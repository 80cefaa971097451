"""Scissorhands against its counting written out, one head of one text at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.policies import parse
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax
from tests.products import each_once

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


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "window"), each_once([4, 1], [40, 5]))
def test_is_the_literal_count(group, window):
    """Prompts longer and shorter than the budget and the window, and steps through two evictions."""
    heads, size, steps, lengths = 2, 48, 16, np.array([48, 30, 13])
    policy = parse(f"scissorhands:budget=24,window={window},recent=4,drop=0.25")
    q, k, v = one_layer.random_streams(group + window, 3, heads, group, size + steps)
    literal = [[Head(24, window, 4, 0.25) for _ in range(heads)] for _ in lengths]
    _, entries = one_layer.read(policy, lengths, size, q, k, v)

    def assert_same():
        for row, heads_of_row in enumerate(literal):
            assert one_layer.held(entries, row) == [sorted(head.keys) for head in heads_of_row]

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
        _, entries = one_layer.step(policy, lengths + t, entries, q[:, :, at], k[:, :, at], v[:, :, at])
        assert_same()
