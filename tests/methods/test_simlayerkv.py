"""SimLayerKV: which layers are lazy, from attention in float64 NumPy, and what fits into a budget."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import Fixed, LazyLayers
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py). With a threshold of 1 the budget alone decides; a lower
# one makes layers lazy whose prompt is within the budget.
OPTIONS = ("budget=12,threshold=1.0,sinks=1,recent=3", "budget=0.5,threshold=0.4,sinks=1,recent=3,last=2")


def test_the_threshold_is_the_attention_of_the_last_queries():
    """The sum of positive scores of each head, in rows of different lengths, one shorter than what is always kept."""
    heads, group, size, lengths, last = 2, 3, 30, np.array([30, 17, 4]), 2
    policy = parse(f"simlayerkv:sinks=2,recent=5,last={last}")
    q, k, v = one_layer.random_streams(4, 3, heads, group, size)
    scores = one_layer.scores(policy, lengths, size, q, k, v)
    for row, length in enumerate(lengths):
        for head in range(heads):
            own = slice(head * group, (head + 1) * group)
            keys = np.stack([rotated(k[row, head, size - length + p], p, 1e4) for p in range(length)])
            expected = 0.0
            for p in range(length - last, length):
                weights = softmax(rotated(q[row, own, size - length + p], p, 1e4) @ keys[: p + 1].T / np.sqrt(8))
                inside = [c < 2 or c >= length - 5 for c in range(p + 1)]
                expected += weights[:, inside].sum() / group / last
            found = scores[row, head][np.isfinite(scores[row, head])]
            np.testing.assert_allclose(found[found > 0].sum(), expected, rtol=1e-5)
            np.testing.assert_allclose(np.abs(found).sum(), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("budget", "threshold", "expected"),
    [
        (20, 0.5, [20, 6, 6, 20]),  # the threshold alone
        (20, 0.9, [20, 20, 20, 20]),
        (20, 0.3, [6, 6, 6, 20]),
        (17, 0.9, [20, 20, 6, 20]),  # as many of the laziest as the total needs
        (16, 0.9, [20, 6, 6, 20]),
        (6, 1.0, [6, 6, 6, 6]),
    ],
)
def test_lazy_layers(budget, threshold, expected):
    """Four layers of 20 tokens; the sums of positive scores are 0.4, 0.7, 0.8 and 0.1, averaged over two heads."""
    scores = np.full((4, 1, 2, 24), -0.01, np.float32)
    scores[..., 20:] = -np.inf
    for layer, sums in enumerate(((0.3, 0.5), (0.7, 0.7), (1.0, 0.6), (0.0, 0.2))):
        scores[layer, 0, :, 0] = sums
    counts = LazyLayers(Fixed(20), 6, threshold).allocate(scores, jnp.full((4, 1), budget), 0, ALL_HEADS)
    assert np.asarray(counts)[:, 0].tolist() == [[n, n] for n in expected]


def test_layers_with_a_sliding_window_save_less():
    """One layer of 20 tokens and three of 5, the lazier ones: making one of these lazy would leave 33 of 28."""
    scores = np.full((4, 1, 2, 24), -np.inf, np.float32)
    for layer, (held, laziness) in enumerate([(20, 0.1), (5, 0.4), (5, 0.6), (5, 0.5)]):
        scores[layer, ..., :held], scores[layer, ..., 0] = -0.01, laziness
    for budget, expected in ((9, [20, 5, 5, 5]), (8, [20, 4, 4, 4]), (7, [4, 4, 4, 4])):
        counts = LazyLayers(Fixed(budget), 4, 1.0).allocate(jnp.asarray(scores), jnp.full((4, 1), budget), 0, ALL_HEADS)
        assert np.asarray(counts)[:, 0, 0].tolist() == expected


def test_lazy_layers_retain_the_first_and_the_newest():
    """A budget for one of two layers makes the lazier one lazy; without one, no layer passes a threshold of 1."""
    params, rows = tiny.decoder(windows=(None, None)), [np.random.default_rng(n).integers(0, 64, n) for n in (24, 9)]
    _, cache = tiny.prefill(params, "simlayerkv:budget=16,threshold=1.0,sinks=1,recent=3", rows, 24)
    lazy, full = sorted(tiny.held(cache, 0), key=lambda layer: len(layer[0]))
    assert lazy == [[0, 21, 22, 23]] * 2
    assert full == [list(range(24))] * 2
    assert tiny.held(cache, 1) == [[list(range(9))] * 2] * 2
    _, cache = tiny.prefill(params, "simlayerkv:threshold=1.0,sinks=1,recent=3", rows, 24)
    assert tiny.held(cache, 0) == [[list(range(24))] * 2] * 2
