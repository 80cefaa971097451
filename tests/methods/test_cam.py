"""CaM's merge and selection against their equations, in NumPy, one token at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import AccumulatedAttention, Fixed, Newest, RandomDraw, Recency, TopTokens, ValueMerge
from kvjax.policies import cam, parse
from kvjax.policy import Moment, Policy, Ranked

RNG = np.random.default_rng(3)


def now(rows):
    return Moment(jnp.zeros(rows, int), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros(0)))


@partial(jax.jit, static_argnames=("merge", "count"))
def absorbed(merge, entries, received, lost, count):
    """The entries after a merge, which must let those leave that the selection evicts."""
    scores = jnp.where(entries.positions >= 0, jnp.asarray(received, jnp.float32), -jnp.inf)
    return merge.absorb(entries, now(len(lost)), scores, lost, count)


def layer(values, positions):
    values, positions = jnp.asarray(values, jnp.float32), jnp.asarray(positions)
    return Slots(values, values, positions, jnp.full(positions.shape[:2], positions.shape[2]))


def test_e2_expected():
    entries = layer(np.array([8.0, 0, 0, 0])[None, None, :, None], [[[0, 1, 2, 3]]])
    lost = jnp.arange(4)[None, None] == 0
    out, left = absorbed(ValueMerge(3, "expected"), entries, [[[0.2, 0.4, 0.1, 0.3]]], lost, count=1)
    np.testing.assert_allclose(out.values[0, 0, :, 0], [8, 2, 2, 2], rtol=1e-6)
    np.testing.assert_array_equal(left, lost)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("form", ["bernoulli", "expected"])
def test_values_go_to_the_next_kept_tokens(form):
    """Slots in any order, some empty; two victims per head, or none; the later has fewer tokens after it than m."""
    B, H, S, m = 3, 2, 24, 5
    positions = np.stack([[RNG.permutation(40)[:S] for _ in range(H)] for _ in range(B)])
    positions[:, :, -3:] = -1
    values, received = RNG.normal(size=(B, H, S, 4)), RNG.random((B, H, S)) ** 3
    lost = np.zeros((B, H, S), bool)
    for b, h in np.ndindex(2, H):
        order = np.argsort(positions[b, h])
        lost[b, h, order[[4, -3]]] = True
    entries = layer(values, positions)
    out, _ = absorbed(ValueMerge(m, form, seed=5), entries, received, jnp.asarray(lost), count=2)
    draws, merged = np.asarray(jax.jit(lambda entries: RandomDraw(5)(entries, now(B)))(entries)), set()
    for b, h in np.ndindex(B, H):
        expected = values[b, h].copy()
        for i in np.flatnonzero(lost[b, h]):
            later = [j for j in range(S) if positions[b, h, j] > positions[b, h, i] and not lost[b, h, j]]
            later = sorted(later, key=lambda j: positions[b, h, j])[:m]
            p = min(1, received[b, h, i] / received[b, h, later].mean())
            if form == "bernoulli":
                merged.add(p := float(draws[b, h, i] < p))
            expected[later] += p * values[b, h, i] / len(later)
        np.testing.assert_allclose(out.values[b, h], expected, atol=1e-5)
    assert form == "expected" or merged == {0, 1}


@pytest.mark.slow
def test_the_newest_stay_whatever_they_score():
    """Protected entries, then the newest; the oldest that are not protected leave first."""
    positions = np.stack([[RNG.permutation(20) for _ in range(2)] for _ in range(2)])
    np.put_along_axis(positions[1], positions[1].argsort(axis=-1)[:, :3], -1, axis=-1)
    scores = np.where(positions >= 0, RNG.normal(size=positions.shape), -np.inf).astype(np.float32)
    scores[(positions >= 0) & (positions < 5)] = np.inf
    counts = np.array([[12, 7], [12, 9]])
    index = np.asarray(Newest().keep(Ranked(scores, positions, counts, 12)))
    expendable = np.where(positions < 0, np.inf, scores).astype(np.float32)
    victims = np.asarray(Newest().victims(expendable, positions, 3))
    for b, h in np.ndindex(2, 2):
        first = [p for p in range(5) if p in positions[b, h]]
        newest = list(range(20 - (counts[b, h] - len(first)), 20))
        got = positions[b, h, index[b, h][index[b, h] >= 0]]
        assert sorted(got.tolist()) == first + newest
        assert positions[b, h, victims[b, h]].tolist() == [5, 6, 7]


def test_a_score_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"^ValueMerge: it compares .* the score Recency does not accumulate it"):
        Policy(Recency(), Fixed(16), TopTokens(), ValueMerge(), every=1)
    assert cam(64, group="max").score == AccumulatedAttention("max")
    assert parse(repr(cam(64))) == cam(64)
