"""CaM's merge against its equations, in NumPy, one token at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import LayerCache
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import Fixed, Recency, TopTokens, ValueMerge
from kvjax.policies import cam, parse
from kvjax.policy import Policy
from kvjax.protocols import Moment

RNG = np.random.default_rng(3)


@partial(jax.jit, static_argnames=("merge", "count"))
def absorbed(merge, entries, lost, count):
    moment = Moment(jnp.zeros(len(lost), int), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros(0)))
    return merge.absorb(entries, moment, lost, count)


def layer(values, positions, received):
    values, positions = jnp.asarray(values, jnp.float32), jnp.asarray(positions)
    capacity = jnp.full(positions.shape[:2], positions.shape[2])
    return LayerCache(values, values, positions, capacity, per_slot=jnp.asarray(received, jnp.float32))


def test_e2_expected():
    entries = layer(np.array([8.0, 0, 0, 0])[None, None, :, None], [[[0, 1, 2, 3]]], [[[0.2, 0.4, 0.1, 0.3]]])
    lost = jnp.arange(4)[None, None] == 0
    out = absorbed(ValueMerge(3, "expected"), entries, lost, count=1)
    np.testing.assert_allclose(out.values[0, 0, :, 0], [8, 2, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("form", ["expected", "bernoulli"])
def test_values_go_to_the_next_kept_tokens(form):
    """Slots in any order, some empty; two victims a head, or none; the last has fewer tokens after it than share."""
    B, H, S, m = 3, 2, 24, 5
    positions = np.stack([[RNG.permutation(40)[:S] for _ in range(H)] for _ in range(B)])
    positions[:, :, -3:] = -1
    values, received = RNG.normal(size=(B, H, S, 4)), RNG.random((B, H, S)) ** 3
    lost = np.zeros((B, H, S), bool)
    for b, h in np.ndindex(2, H):
        order = np.argsort(positions[b, h])
        lost[b, h, order[[4, -3]]] = True
    out = absorbed(ValueMerge(m, form), layer(values, positions, received), jnp.asarray(lost), count=2)
    merged = set()
    for b, h in np.ndindex(B, H):
        expected = values[b, h].copy()
        for i in np.flatnonzero(lost[b, h]):
            later = [j for j in range(S) if positions[b, h, j] > positions[b, h, i] and not lost[b, h, j]]
            later = sorted(later, key=lambda j: positions[b, h, j])[:m]
            p = min(1, received[b, h, i] / received[b, h, later].mean())
            if form == "expected":
                expected[later] += p * values[b, h, i] / len(later)
                continue
            change = np.asarray(out.values[b, h, later[-1]]) - values[b, h, later[-1]]
            whole = np.allclose(change, values[b, h, i] / len(later), atol=1e-5)
            assert whole or np.allclose(change, 0, atol=1e-5)
            assert whole or p < 1
            merged.add(whole)
        if form == "expected":
            np.testing.assert_allclose(out.values[b, h], expected, atol=1e-5)
    assert form == "expected" or merged == {True, False}
    np.testing.assert_array_equal(out.values[2], jnp.asarray(values[2], jnp.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tokens=0", "tokens=0: accepted is an integer >= 1"),
        ("form=greedy", "form='greedy': accepted are 'bernoulli' and 'expected'"),
        ("seed=-1", "seed=-1: accepted is"),
        ("every=None", "ValueMerge merges while decoding, and every=None"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        parse(f"cam:{options}")


def test_a_score_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"ValueMerge looks at the attention .* which Recency does not keep"):
        Policy(Recency(), Fixed(16), TopTokens(), ValueMerge(), every=1)
    assert parse(repr(cam(64))) == cam(64)
