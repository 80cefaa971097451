"""LazyEviction against its bookkeeping written out in float64 NumPy, one head of one text at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import parse
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=3,alpha=0.1", "budget=0.5,window=2")

BUDGET, WINDOW = 14, 3


class Head:
    """One kv head: the keys it holds, and for each of them the times at which a query gave it `alpha` or more."""

    def __init__(self, alpha):
        self.alpha, self.keys, self.active, self.closest, self.returned = alpha, {}, {}, np.inf, 0

    def see(self, position, q, k):
        self.keys[position], self.active[position] = rotated(k, position, 1e4), [position - 1]
        queries = rotated(q, position, 1e4)
        weights = softmax(queries @ np.stack(list(self.keys.values())).T / np.sqrt(k.shape[-1])).mean(axis=0)
        self.closest = min(self.closest, abs(weights / self.alpha - 1).min())
        for token, weight in zip(self.keys, weights, strict=True):
            if weight >= self.alpha:
                self.active[token].append(position)

    def score(self, token, now):
        times = self.active[token]
        if len(times) == 1:  # never active
            return 2 / (1 + np.e) if now - 1 == times[0] else 0.0
        longest = max(np.diff(times))
        return 2 / (1 + np.exp(1 + (now - 1 - times[-1]) / longest)) + 2 / (1 + np.exp(longest - 1))

    def evict(self, now, count):
        """Those with the lowest scores leave, of equal ones the later."""
        old = sorted((p for p in self.keys if p < now - WINDOW), key=lambda p: (np.float32(self.score(p, now)), -p))
        oldest = sorted(old)[: max(count, 0)]
        self.returned += set(oldest) != set(old[: max(count, 0)])
        for p in old[: max(count, 0)]:
            del self.keys[p], self.active[p]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "alpha"), [(4, 0.08), (1, 0.1), (7, 0.07)])
def test_is_the_literal_bookkeeping(group, alpha):
    """Prompts longer and shorter than the budget, one shorter than the window; 14 steps."""
    heads, size, steps, lengths = 2, 26, 14, np.array([26, 12, 2])
    policy = parse(f"lazyeviction:budget={BUDGET},window={WINDOW},alpha={alpha}")
    q, k, v = one_layer.random_streams(group, 3, heads, group, size + steps)
    literal = [[Head(alpha) for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-5
    assert sum(head.returned for own in literal for head in own) > 5  # not simply the oldest


def test_a_long_prompt_is_observed_in_blocks():
    """More queries than a block has, in one call, against one query at a time."""
    size, alpha = 150, 0.01
    q, k, v = one_layer.random_streams(5, 2, 1, 2, size)
    policy = parse(f"lazyeviction:budget=40,window=4,alpha={alpha}")
    lengths = np.array([size, 70])
    scores = np.asarray(one_layer.scores(policy, lengths, size, q, k, v))
    for row, length in enumerate(lengths):
        head = Head(alpha)
        for p in range(length):
            head.see(p, q[row, :, size - length + p], k[row, 0, size - length + p])
        expected = [head.score(p, length) for p in range(length)]
        np.testing.assert_allclose(scores[row, 0][np.isfinite(scores[row, 0])], expected, atol=1e-5)
        assert head.closest > 1e-6


def test_the_two_parts_of_the_score():
    """Tokens 0 to 3 at the newest position 9: active at 9 and 7, at 4 after 4 positions, at 3, and never."""
    policy = parse("lazyeviction:budget=8,window=1")
    last = [10, 4, 2, 0]  # counted from the position before the token
    longest = [2, 4, 1, 0]
    entries = one_layer.entries_at([[0, 1, 2, 3]], per_slot=None)
    state = tuple(jnp.array(x, jnp.int32)[None, None] for x in (last, longest))
    entries = type(entries)(entries.keys, entries.values, entries.positions, entries.capacity, state)
    scores = policy.score(entries, one_layer.moment(10))[0, 0]
    expected = [
        2 / (1 + np.exp(1)) + 2 / (1 + np.exp(1)),
        2 / (1 + np.exp(1 + 5 / 4)) + 2 / (1 + np.exp(3)),
        2 / (1 + np.exp(1 + 6)) + 1,
        0,
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
