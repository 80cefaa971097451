"""FastGen: the sets of entries and what they recover in float64 NumPy, and what fits into a budget."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import Fixed, RecoveringHeads
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import attended, rotated, softmax

# What the tests of all presets run (tests/policy/presets.py). With a recovery of 1 the budget alone decides.
OPTIONS = ("budget=12,recovery=1.0,sinks=1", "budget=0.5,recovery=1.0,sinks=2,frequent=0.2,local=0.5,groups=2")


def sets_of(received, sinks, frequent, local):
    """The four sets of tokens, given what each received from all queries: the fewest first."""
    n = len(received)
    first = set(range(min(sinks, n)))
    often = set(sorted(range(n), key=lambda p: -received[p])[: int(frequent * n + 1e-9)])
    near = set(range(n - int(local * n + 1e-9), n))
    return [first, first | often, first | often | near, set(range(n))]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_classes_are_the_sets(group):
    """Rows of different lengths, one shorter than the first tokens; the shares add up to 1 in each head."""
    heads, size, lengths = 2, 30, np.array([30, 17, 2])
    policy = parse("fastgen:sinks=3,frequent=0.25,local=0.4")
    q, k, v = one_layer.random_streams(group, 3, heads, group, size)
    scores = np.asarray(one_layer.scores(policy, lengths, size, q, k, v))
    for row, length in enumerate(lengths):
        for head in range(heads):
            received = np.zeros(length)
            keys = np.stack([rotated(k[row, head, size - length + p], p, 1e4) for p in range(length)])
            for p in range(length):
                queries = rotated(q[row, head * group : (head + 1) * group, size - length + p], p, 1e4)
                received[: p + 1] += softmax(queries @ keys[: p + 1].T / np.sqrt(8)).mean(axis=0)
            own = scores[row, head][np.isfinite(scores[row, head])]
            for lowest, expected in zip((3, 2, 1, 0), sets_of(received, 3, 0.25, 0.4), strict=True):
                assert set(np.flatnonzero(own >= lowest)) == expected
            np.testing.assert_allclose(2 * (own - np.floor(own)), received / length, atol=2e-6)


@pytest.mark.parametrize(
    ("budget", "recovery", "least", "expected"),
    [
        (10, 0.7, 0, [[2, 5], [7, 10]]),
        (10, 0.2, 0, [[2, 2], [2, 2]]),
        (10, 0.99, 0, [[10, 10], [10, 10]]),
        (6, 0.7, 0, [[2, 5], [7, 10]]),  # 24 entries fit
        (5, 0.7, 0, [[2, 5], [5, 7]]),  # lowered to 0.65: the last head recovers it with 7, and the one before with 5
        (3, 0.9, 0, [[2, 2], [2, 5]]),
        (7, 0.7, 4, [[4, 5], [7, 10]]),
        (10, 0.2, 12, [[10, 10], [10, 10]]),  # all that there is
    ],
)
def test_the_fewest_that_recover(budget, recovery, least, expected):
    """Two layers of two heads with 10 tokens in 12 slots: 2 first, 3 frequent, 2 local and 3 others."""
    scores = np.full((2, 1, 2, 12), -np.inf, np.float32)
    kinds = np.repeat([3, 2, 1, 0], [2, 3, 2, 3])
    for (layer, head), classes in {
        (0, 0): (0.8, 0.1, 0.05, 0.05),
        (0, 1): (0.5, 0.25, 0.15, 0.1),
        (1, 0): (0.36, 0.3, 0.24, 0.1),
        (1, 1): (0.25, 0.2, 0.2, 0.35),
    }.items():
        shares = np.repeat(np.array(classes) / (2, 3, 2, 3), [2, 3, 2, 3])
        scores[layer, 0, head, :10] = kinds + shares / 2
    shares = RecoveringHeads(Fixed(10), recovery)
    counts = np.asarray(shares.allocate(scores, jnp.full((2, 1), budget), least, ALL_HEADS))[:, 0]
    assert counts.tolist() == expected


@pytest.mark.slow
def test_each_head_retains_its_set():
    """The first layer of a model, for recoveries that choose each of the sets; the answer is added."""
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, 64, n) for n in (40, 9)]
    chosen = set()
    for recovery in (0.1, 0.4, 0.6, 0.7, 0.75, 0.95):
        _, cache = tiny.prefill(params, f"fastgen:sinks=2,recovery={recovery}", rows, 40, room=2)
        _, after = tiny.step(params, cache, np.array([3, 5]), np.ones(2, bool))
        for row, tokens in enumerate(rows):
            received = attended(params, tokens)[2]
            for head, held in enumerate(tiny.held(cache, row)[0]):
                sets = sets_of(received[head], 2, 0.3, 0.3)
                recovered = [sum(received[head][p] for p in own) / len(tokens) for own in sets]
                number = next(i for i, share in enumerate(recovered) if share >= recovery)
                chosen.add(number)
                assert held == sorted(sets[number])
                assert tiny.held(after, row)[0][head] == [*held, len(tokens)]
    assert chosen == {0, 1, 2, 3}
