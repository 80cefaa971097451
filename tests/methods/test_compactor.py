"""Compactor's blend against NumPy; tests/methods/test_kvpress.py has kvpress's selections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.policies import parse
from kvjax.policy import Protect
from tests.methods import one_layer
from tests.methods.test_leverage_score import leverage
from tests.methods.test_non_causal_attention import received

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,chunk=5,sketch=6,sinks=2,recent=3",)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("blend", [0.7, 0.0, 30.0])
def test_scores_are_standardised_over_the_layer_of_a_row(blend):
    """A sketch as wide as the head is exact. In the last row no token takes part."""
    heads, group, size, lengths = 2, 3, 40, np.array([40, 23, 5])
    policy = parse(f"compactor:budget=14,chunk=7,sketch=64,blend={blend},sinks=2,recent=3")
    q, k, v = one_layer.random_streams(4, 3, heads, group, size)
    k = 30 * k  # beside which the ridge is small
    _, entries = one_layer.read(policy, lengths, size, q / 30, k, v)
    for row, length in enumerate(lengths[:2]):
        inside, text = slice(2, length - 3), slice(size - length, None)
        own = [slice(head * group, (head + 1) * group) for head in range(heads)]
        attention = [received(q[row, own[h], text] / 30, k[row, h, text], v[row, h, text], 7, 2, 3) for h in range(2)]
        attention = np.stack(attention)[:, inside]
        outliers = np.stack([leverage(k[row, h, text][inside].astype(np.float64), 0) for h in range(heads)])
        joint = sum(w * (x - x.mean()) / x.std(ddof=1) for w, x in ((blend, outliers), (1, attention)))
        for head, held in enumerate(one_layer.held(entries, row)):
            best = 2 + np.argsort(-joint[head])[:9]
            assert held == sorted([0, 1, *best.tolist(), *range(length - 3, length)])
    assert one_layer.held(entries, 2) == [list(range(5))] * 2


@pytest.mark.parametrize("kept", [Protect(sinks=1, recent=3), Protect(sinks=2, recent=2), Protect(sinks=2, recent=0.5)])
def test_a_policy_that_retains_fewer_tokens_than_are_not_scored_is_refused(kept):
    policy = parse("compactor:budget=14,sinks=2,recent=3")
    assert replace(policy, protect=Protect(sinks=3, recent=4)).score == policy.score
    with pytest.raises(ValueError, match=r"does not score the first 2 and the last 3 tokens, and .*=2 and recent=3 or"):
        replace(policy, protect=kept)
