"""TriAttention against its series in complex NumPy, and a head of which everything is known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import AttentionLayer, Rope
from kvjax.models.rope import NO_ROPE
from kvjax.parts import DistancePreference, Moment
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer, saved_statistics

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "budget=12,recent=2,every=3",
    "budget=12,sinks=1,recent=1,every=1,farthest=8",
    "budget=0.5,recent=2,every=None",
)
ROPE = Rope(1e4)
FARTHEST = 40  # distances 1, 2, 4, .. 32


def series(mean, norms, keys, positions, now, farthest=FARTHEST):
    """The sum of both terms for one query head, from keys [N, D] after RoPE, as complex numbers before it."""
    half = keys.shape[1] // 2
    frequencies = 1e4 ** (-np.arange(half) / half)
    turned = keys[:, :half] + 1j * keys[:, half:]
    before = turned * np.exp(-1j * positions[:, None] * frequencies)
    centre = mean[:half] + 1j * mean[half:]
    amplitude, phase = np.abs(centre) * np.abs(before), np.angle(centre) - np.angle(before)
    distances = [2**i for i in range(64) if 2**i <= farthest]
    waves = [amplitude * np.cos((now + t - positions)[:, None] * frequencies + phase) for t in distances]
    return np.mean(waves, axis=0).sum(axis=1) + (np.abs(before) * (norms - np.abs(centre))).sum(axis=1)


def standardised(x):
    return (x - x.mean()) / max(x.std(), 1e-6)


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(1, 3), (4, 1), (7, None)])
def test_heads_hold_what_the_series_retains(group, every):
    params, statistics = saved_statistics.decoder(group)

    def score(h, keys, values, positions, now):
        heads = range(h * group, (h + 1) * group)
        mean, norms = statistics["query_mean"], statistics["query_norms"]
        return np.max([standardised(series(mean[g], norms[g], keys, positions, now)) for g in heads], axis=0)

    policy = f"triattention:budget=10,sinks=1,recent=2,every={every},farthest={FARTHEST}"
    saved_statistics.assert_follows(params, policy, score, budget=10, sinks=1, recent=2, every=every)


def scores(mean, norms, keys, rope=ROPE, next_position=3, farthest=1):
    """Of one head with channels 2, for its only query head."""
    statistics = {"query_mean": jnp.array([mean]), "query_norms": jnp.array([norms])}
    layer = AttentionLayer(0, rope, None, 1.0, jnp.zeros((1, len(mean), 1)), statistics=statistics)
    keys = np.array([keys], float)
    entries = one_layer.entries_at([range(keys.shape[1])], keys, keys)
    return np.asarray(DistancePreference(farthest)(entries, Moment(jnp.array([next_position]), layer)))[0, 0]


def test_a_worked_example():
    """One pair of frequency 1. Keys along the direction of the turned mean win, then those with large norms.

    At position 3 + 1 the mean query (1, 0) has turned to (cos 4, sin 4). Keys of norm 1 along it and against it, and of
    norm 2 across it, have the logits 1, -1 and 0. The norm term adds (1.5 - 1) |k|, so that z = 1.5, -0.5, 1.
    """
    along = np.array([np.cos(4), np.sin(4)])
    across = 2 * np.array([-np.sin(4), np.cos(4)])
    expected = standardised(np.array([1.5, -0.5, 1.0]))
    np.testing.assert_allclose(scores([1.0, 0.0], [1.5], [along, -along, across]), expected, atol=1e-6)


def test_layers_without_rope_have_the_product_alone():
    expected = standardised(np.array([2.0, -1.0]))
    found = scores([1.0, 1.0], [0.0], [[2.0, 0.0], [0.0, -1.0]], rope=NO_ROPE)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_equal_keys_have_equal_scores():
    np.testing.assert_array_equal(scores([0.0, 0.0], [1.0], [[3.0, 4.0]] * 4), np.zeros(4))


def test_parameters_without_statistics_are_refused():
    says = "reads the statistics query_mean, query_norms, and the parameters have none"
    for call in (
        lambda: kvjax.generate(tiny.decoder(), [1], policy="triattention"),
        lambda: kvjax.empty_cache(tiny.decoder(), parse("triattention"), [5]),
        lambda: list(kvjax.prefill_each(tiny.decoder(), [1], policies=["full", "triattention"])),
    ):
        with pytest.raises(ValueError, match=says):
            call()
