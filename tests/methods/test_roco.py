"""RoCo against its equations in float64 NumPy, one head of one text at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.parts import Slots
from kvjax.policies import parse
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,recent=2,every=3", "budget=0.5,exempt=0.6,recent=1,sinks=1,every=None")

BUDGET, EXEMPT, RECENT, SINKS = 10, 0.7, 2, 1


class Head:
    """One kv head with its query heads: the keys it holds, and all weights that each of them has received."""

    def __init__(self):
        self.keys, self.weights, self.closest, self.swayed = {}, {}, np.inf, 0

    def see(self, position, q, k):
        self.keys[position], self.weights[position] = rotated(k, position, 1e4), []
        queries = rotated(q, position, 1e4)
        weights = softmax(queries @ np.stack(list(self.keys.values())).T / np.sqrt(k.shape[-1])).mean(axis=0)
        for token, weight in zip(self.keys, weights, strict=True):
            self.weights[token].append(weight)

    def evict(self, now, count):
        if count <= 0:
            return
        protected = {p for p in self.keys if p < SINKS or p >= now - RECENT}
        by_spread = sorted(self.keys, key=lambda p: -np.inf if p in protected else -np.std(self.weights[p]))
        number = int(EXEMPT * BUDGET)
        inside = sorted(by_spread[number:], key=lambda p: np.mean(self.weights[p]))
        spread = [np.std(self.weights[p]) for p in by_spread[number - 1 : number + 1]]
        means = [np.mean(self.weights[p]) for p in inside[count - 1 : count + 1]]
        self.closest = min([self.closest, *(abs(np.subtract(*x)) for x in (spread, means) if len(x) == 2)])
        plain = sorted(set(self.keys) - protected, key=lambda p: np.mean(self.weights[p]))
        self.swayed += set(plain[:count]) != set(inside[:count])
        for p in inside[:count]:
            del self.keys[p], self.weights[p]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(7, 3), (1, 1), (4, 1)])
def test_retains_what_the_equations_retain(group, every):
    """Prompts longer and shorter than the budget, one shorter than what is protected; 14 steps."""
    heads, size, steps, lengths = 2, 20, 14, np.array([20, 9, 1])
    policy = parse(f"roco:budget={BUDGET},exempt={EXEMPT},recent={RECENT},sinks={SINKS},every={every}")
    q, k, v = one_layer.random_streams(group, 3, heads, group, size + steps)
    q[..., 3], k[..., 3] = 4, 0  # a channel that hardly rotates, for
    k[:, :, ::2] *= 0.3  # tokens with steady attention, and
    k[:, :, 1::2] *= 3  # those with less of it, at times much
    k[:, :, 1::2, 3] = -3
    literal = [[Head() for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-6
    assert sum(head.swayed for own in literal for head in own) > 5  # the deviation decides, too


# Four tokens, rows are queries: token 1 has the least mean but the largest deviation but for the first.
WEIGHTS = np.array(
    [
        [1.0, 0.0, 0.0, 0.0],
        [0.7, 0.3, 0.0, 0.0],
        [0.6, 0.0, 0.4, 0.0],
        [0.4, 0.0, 0.3, 0.3],
    ]
)


@pytest.mark.parametrize(
    ("exempt", "retained"),
    [
        (0.0, [0, 2, 3]),  # means 0.675, 0.1, 0.35, 0.3
        (0.4, [0, 2, 3]),  # one exempt, token 0: deviations 0.217, 0.141, 0.05, 0
        (0.7, [0, 1, 2]),  # two exempt
    ],
)
def test_the_deviation_exempts(exempt, retained):
    policy = parse(f"roco:budget=3,exempt={exempt},recent=0")
    per_slot = jnp.asarray(np.stack([WEIGHTS.sum(axis=0), (WEIGHTS**2).sum(axis=0)]), jnp.float32)
    entries = one_layer.entries_at([[0, 1, 2, 3]])
    entries = Slots(entries.keys, entries.values, entries.positions, jnp.array([[3]]), tuple(per_slot[:, None, None]))
    left = one_layer.compress(policy, entries, one_layer.moment(4), 3)
    assert left.positions[0, 0].tolist() == retained


def test_a_sliding_window_counts_its_queries_only():
    policy = parse("roco:budget=4,recent=0")
    entries = one_layer.entries_at([[0, 5, 9]])
    sums = jnp.array([[[1.0, 2.0, 0.5]]])
    entries = Slots(entries.keys, entries.values, entries.positions, entries.capacity, (sums, sums))
    scores = policy.score(entries, one_layer.moment(10, window=4))
    np.testing.assert_allclose(scores, [[[1 / 4, 2 / 4, 0.5]]])
