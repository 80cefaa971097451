"""VaSE's scores in float64 NumPy, given the noise; the noise; and that large values stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.common.window_attention import QueryRing
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=3,kernel=3,sinks=1,every=3", "budget=0.5,window=4,large=0.5,kernel=1,sinks=0,every=None")


@partial(jax.jit, static_argnames=("score", "index"))
def noise_of(score, entries, now, index=0):
    return score.noise(entries, one_layer.moment(now, 2, index=index))[0]


@partial(jax.jit, static_argnames="score")
def scored(score, entries, counts):
    """The noise, the scores of heads that retain so many entries, and those that are compared before."""
    now = one_layer.moment(64, heads=6, counts=counts)
    return score.noise(entries, now)[0], score(entries, now)[0], score(entries, now._replace(counts=None))[0]


def test_scores_are_the_equations():
    """40 entries among empty slots in two heads of three query heads each; the last 4 are the window's."""
    rng, (H, G, W, M, D) = np.random.default_rng(0), (2, 3, 4, 44, 4)
    q, k, v = rng.normal(size=(H * G, W, D)), rng.normal(size=(H, M, D)), rng.normal(size=(H, M, D))
    positions = np.full((H, M), -1)
    for head in range(H):
        positions[head, rng.permutation(M)[:40]] = [*rng.choice(60, 36, replace=False), 60, 61, 62, 63]
    score = parse(f"vase:window={W},kernel=3,sinks=2,large=0.3,every=1").score
    at = np.broadcast_to(np.arange(60, 64), (1, H, W))
    ring = QueryRing(jnp.asarray(q, jnp.float32)[None], jnp.zeros((1, H * G, W)), jnp.asarray(at))
    entries = replace(one_layer.entries_at(positions, k, v), per_row=ring)
    counts = np.array([31, 33])  # 9.3 and 9.9 entries with large values: 9
    noise, ours, without = map(np.asarray, scored(score, entries, counts))
    for head in range(H):
        order = np.argsort(positions[head])
        distant = order[(positions[head, order] >= 0) & (positions[head, order] < 60)]
        own = q[head * G : (head + 1) * G] @ k[head, distant].T * 0.5
        mean = np.pad(softmax(own).mean(axis=(0, 1)), 1)
        pooled = (mean[:-2] + mean[1:-1] + mean[2:]) / 3
        spread = v[head, distant].max(-1) - v[head, distant].min(-1)
        spread[positions[head, distant] < 2] = np.inf
        expected = np.log(pooled) + noise[head, distant]
        expected[np.argsort(-spread)[:9]] = 1e9
        np.testing.assert_allclose(ours[head, distant], expected, rtol=1e-4)
        np.testing.assert_allclose(without[head, distant], np.log(pooled), rtol=1e-4)
    assert without.max() < 0


def test_noise_is_gumbel_and_new_at_every_eviction():
    score = parse("vase").score
    entries = one_layer.entries_at(np.arange(8_000).reshape(2, -1) % 4_000)
    draws = [np.asarray(noise_of(score, entries, now, i)) for now, i in ((1, 0), (2, 0), (1, 1))]
    draws = np.stack(draws).reshape(6, -1)
    assert abs(draws.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / draws.size)
    np.testing.assert_allclose(draws.var(axis=1), np.pi**2 / 6, rtol=0.15)
    assert np.abs(np.corrcoef(draws) - np.eye(6)).max() < 0.1


@pytest.mark.slow
def test_large_values_stay_while_others_come_and_go():
    """A model's first layer: of the tokens that leave the window, those with the largest range of all are retained."""
    params, (row,) = tiny.decoder(), [np.random.default_rng(3).integers(0, tiny.VOCAB, 30)]
    seen = []

    def attend(layer, q, k, v, cache):
        seen.append(np.asarray(v[0], np.float64))
        return q, cache

    params(row[None], attend)
    runs = []
    for seed in (0, 1):
        _, cache = tiny.prefill(params, f"vase:budget=14,window=4,large=0.5,sinks=0,every=2,seed={seed}", [row], 32)
        runs.append(tiny.held(cache, 0)[0])
        for head, held in enumerate(runs[-1]):
            spread = np.ptp(seen[0][head][:26], axis=-1)
            assert set(np.argsort(-spread)[:7]) <= set(held)
            assert len(held) == 14
    assert runs[0] != runs[1]
