"""Expected attention in a cache that evicts while decoding, against its equation in float64 NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.policies import parse
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

BUDGET, SINKS, FUTURE = 14, 2, 5


class Head:
    """One kv head: the keys it holds, the values of all tokens, and its group's queries before rotation so far."""

    def __init__(self, values):
        self.values, self.keys, self.queries, self.closest = values.astype(np.float64), {}, [], np.inf

    def see(self, position, q, k):
        self.keys[position] = rotated(k.astype(np.float64), position, 1e4)
        if position >= SINKS:
            self.queries.append(q.astype(np.float64))

    def evict(self, now, count):
        """Those with the lowest scores leave. The statistics are those of all queries at positions below `now`."""
        if count <= 0:
            return
        held = [p for p in self.keys if p >= SINKS]
        keys = np.stack([self.keys[p] for p in held])
        dim, scores = keys.shape[1], np.zeros(len(held))
        turn = np.mean([rotated(np.eye(dim), now + t, 1e4).T for t in range(FUTURE)], axis=0)
        for own in np.stack(self.queries, axis=1):
            mean, covariance = turn @ own.mean(axis=0), turn @ np.cov(own.T, bias=True) @ turn.T
            logits = keys @ mean / np.sqrt(dim) + np.einsum("nd,de,ne->n", keys, covariance, keys) / dim / 2
            scores += softmax(logits)
        scores *= [np.linalg.norm(self.values[p]) for p in held]
        order = np.argsort(scores)
        self.closest = min(self.closest, scores[order[count]] / scores[order[count - 1]] - 1)
        for i in order[:count]:
            del self.keys[held[i]]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(4, 3), (1, 1), (7, 5)])
def test_heads_that_evict_hold_what_the_equation_retains(group, every):
    """Prompts longer and shorter than the budget, and one of a token; 14 steps."""
    heads, size, steps, lengths = 2, 26, 14, np.array([26, 12, 1])
    policy = replace(parse(f"expected_attention:budget={BUDGET},sinks={SINKS},future={FUTURE}"), every=every)
    q, k, v = one_layer.random_streams(group, 3, heads, group, size + steps)
    literal = [[Head(v[row, h, size - length :]) for h in range(heads)] for row, length in enumerate(lengths)]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-5
