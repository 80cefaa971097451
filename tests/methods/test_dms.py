"""DMS's threshold: what each head retains, from scores in float64 NumPy, and what fits into a budget."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.mesh.heads import ALL_HEADS
from kvjax.parts import Fixed, ThresholdShares
from kvjax.policies import parse
from tests import tiny
from tests.products import each_once

# What the tests of all presets run (tests/policy/presets.py). No score is below the thresholds, so the budget decides.
OPTIONS = (
    "base=keydiff,threshold=-2.0,window=2,budget=12",
    "base=h2o,threshold=0.0,window=3,budget=0.5,groups=2",
)


def differences(keys):
    """KeyDiff's scores."""
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    anchor = units.mean(axis=0)
    return -units @ (anchor / np.linalg.norm(anchor))


def norms(keys):
    """The scores of `knorm`."""
    return -np.linalg.norm(keys, axis=1)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("base", "scored", "quantile"), each_once([("keydiff", differences), ("knorm", norms)], [0.0, 0.4, 0.8, 1.0])
)
def test_each_head_retains_what_reaches_the_threshold(base, scored, quantile):
    """Rows of different lengths, one within the window; the answer is added."""
    params = tiny.decoder(windows=(None, None))
    rows = [np.random.default_rng(n).integers(0, 64, n) for n in (40, 23, 3)]
    _, full = tiny.prefill(params, base, rows, 40, compress="never")
    scores = {}
    for row, layer, head in np.ndindex(3, len(full.entries), params.config.num_kv_heads):
        keys = np.asarray(full.entries[layer].keys[row, head, : len(rows[row])], np.float64)
        assert full.entries[layer].positions[row, head, : len(keys)].tolist() == list(range(len(keys)))
        scores[row, layer, head] = scored(keys)
    ordered = np.unique(np.concatenate(list(scores.values())).round(5))
    place = int(quantile * (len(ordered) - 2))
    threshold = float(ordered[place : place + 2].mean())  # no score is near it
    _, cache = tiny.prefill(params, f"dms:base={base},base.sinks=1,threshold={threshold},window=4", rows, 40, room=2)
    _, after = tiny.step(params, cache, np.array([3, 5, 7]), np.ones(3, bool))
    sizes = set()
    for (row, layer, head), own in scores.items():
        n = len(own)
        expected = [p for p in range(n) if own[p] >= threshold or p < 1 or p >= n - 4]
        assert tiny.held(cache, row)[layer][head] == expected
        assert tiny.held(after, row)[layer][head] == [*expected, n]
        sizes.add(len(expected) / n)
    assert len(sizes) > 2 or quantile in (0.0, 1.0)


@pytest.mark.parametrize(
    ("budget", "threshold", "groups", "expected"),
    [
        (6, 3.0, 1, [[4, 1], [3, 2]]),
        (6, 3.5, 1, [[4, 1], [3, 2]]),  # one entry scores the threshold exactly
        (6, 0.0, 1, [[6, 6], [6, 6]]),
        (6, 9.0, 1, [[1, 1], [1, 1]]),  # the protected entries
        (2, 3.0, 1, [[3, 1], [2, 2]]),  # 10 entries reach the threshold, 8 fit
        (2, 3.0, 2, [[3, 1], [1, 2]]),  # the first head of both layers has room for 4, the second for 4
    ],
)
def test_the_threshold_and_what_fits(budget, threshold, groups, expected):
    """Two layers of two heads with 6 tokens in 7 slots, of which one is protected."""
    scores = np.full((2, 1, 2, 7), -np.inf, np.float32)
    for (layer, head), own in {
        (0, 0): (5.5, 1.0, 6.5, 3.5, 2.0),
        (0, 1): (1.1, 2.1, 0.5, 0.2, 0.1),
        (1, 0): (4.5, 0.3, 2.2, 4.0, 0.4),
        (1, 1): (0.6, 0.7, 5.0, 0.8, 0.9),
    }.items():
        scores[layer, 0, head, :6] = (*own, np.inf)
    shares = ThresholdShares(Fixed(6), threshold, groups)
    allocate = jax.jit(lambda scores, means: shares.allocate(scores, means, 0, ALL_HEADS))
    assert allocate(scores, np.full((2, 1), budget))[:, 0].tolist() == expected


@pytest.mark.parametrize("budget", [10, 30, 1.0])
def test_a_base_that_evicts_leaves_each_head_room(budget):
    """No head retains fewer entries than it needs for a step, and none grows, also if the prompt fits the budget."""
    policy = parse(f"dms:base=knorm,base.every=2,threshold=1.0,window=3,budget={budget}")  # no norm is negative
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, 64, n) for n in (20, 4)]
    _, cache = tiny.prefill(params, policy, rows, 20)
    assert [len(head) for layer in tiny.held(cache, 0) for head in layer] == [policy.minimum] * 2
    for token in range(6):
        _, cache = tiny.step(params, cache, np.full(2, token), np.ones(2, bool))
        assert {len(head) for layer in tiny.held(cache, 0) for head in layer} <= {4, 5}


def test_the_larger_window_is_protected():
    assert parse("dms:base=snapkv,base.window=64,window=32").protect.recent == 64
    assert parse("dms:base=snapkv,base.window=16,window=32").protect.recent == 32
    assert parse("dms:base=h2o,window=32").protect.recent == 32  # half of a budget that is not used
