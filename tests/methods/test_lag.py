"""LagKV's score against its equations, in NumPy, one run at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import Drop, Fixed, LagDifference, TopTokens
from kvjax.policy import Moment, Policy
from tests.products import each_once

B, H, M, D = 4, 2, 40, 6


def spread(run, following):
    """The shares of one run's keys or values [lag, D]."""
    low, high = following.min(axis=0), following.max(axis=0)
    deviation = ((run - low) / (high - low)).std(axis=1, ddof=1)
    return np.exp(deviation) / np.exp(deviation).sum()


def literal(keys, values, lag, cross):
    """The scores of a head's tokens after the sinks, in order of position; infinite where there is no next run."""
    scores = np.full(len(keys), np.inf)
    for start in range(0, len(keys) - 2 * lag + 1, lag):
        run, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        share = (spread(keys[run], keys[following]) + spread(values[run], values[following])) / 2
        scores[run] = share if cross else np.argsort(np.argsort(share)) / lag
    return scores


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("lag", "sinks", "cross"), each_once([(5, 3), (8, 0), (16, 2), (25, 2), (64, 2)], [False, True])
)
def test_runs_are_measured_by_the_next(lag, sinks, cross):
    """Rows of different lengths in slots of any order: runs that end with the prompt, and prompts of too few runs."""
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(B, H, M, D)).astype(np.float32) for _ in range(2))
    positions = np.full((B, H, M), -1)
    for b, length in enumerate((40, 33, 18, 4)):
        for h in range(H):
            positions[b, h, rng.permutation(M)[:length]] = rng.permutation(length)
    entries = Slots(*map(jnp.asarray, (keys, values, positions)), jnp.full((B, H), M))
    moment = Moment(jnp.full(B, M), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros((H, D, 1))))
    score = LagDifference(sinks, lag, cross)
    scores = np.asarray(jax.jit(lambda entries: score(entries, moment))(entries))
    measured = 0
    for b, h in np.ndindex(B, H):
        slots = np.argsort(positions[b, h])
        slots = slots[positions[b, h, slots] >= sinks]
        expected = literal(keys[b, h, slots], values[b, h, slots], lag, cross)
        there = np.isfinite(expected)
        measured += there.sum()
        np.testing.assert_allclose(scores[b, h, slots][there], expected[there], rtol=1e-5)
        rest = scores[b, h, slots][~there]
        assert (rest >= 1).all(), "above all measured entries"
        assert (np.diff(rest) > 0).all(), "later entries score higher"
    assert measured > 0 or 2 * lag > M - sinks


def test_equal_tokens_and_channels_that_do_not_vary():
    """Of equal tokens the earlier has the higher rank; a channel without a range counts as 0."""
    keys = np.zeros((1, 1, 8, 3), np.float32)
    keys[0, 0, :4, 0], keys[0, 0, 4:, 1] = 1.0, [0, 1, 2, 3]
    entries = Slots(*map(jnp.asarray, (keys, keys, np.arange(8)[None, None])), jnp.full((1, 1), 8))
    moment = Moment(jnp.full(1, 8), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros((1, 3, 1))))
    assert LagDifference(0, 4)(entries, moment)[0, 0].tolist() == [0.75, 0.5, 0.25, 0, 5, 6, 7, 8]


def test_sinks_that_are_not_scored_must_be_protected():
    with pytest.raises(ValueError, match=r"LagDifference: .*Protect\(sinks=0, recent=0\) .*; expected sinks=4 or more"):
        Policy(LagDifference(), Fixed(16), TopTokens(), Drop())
