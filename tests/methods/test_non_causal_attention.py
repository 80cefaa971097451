"""Non-causal attention against NumPy: chunks that are not full, prompts in pieces, tokens that take no part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.parts import NonCausalAttention
from kvjax.policies import parse
from kvjax.policy import Attended, LayerShape
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,chunk=5,sinks=1,recent=2",)


def received(q, k, v, chunk, first=0, last=0):
    """The scores of one kv head [N]; q [G, N, D] and k [N, D] are not rotated yet."""
    N = len(k)
    q, k = (np.stack([rotated(x[..., p, :], p, 1e4) for p in range(N)], axis=-2) for x in (q, k))
    inside = np.arange(first, N - last)
    scores = np.zeros(max(len(inside), 0))
    for start in range(0, len(inside), chunk):
        run = inside[start : start + chunk]
        scores[start : start + chunk] = softmax(q[:, run] @ k[run].T).sum(axis=1).mean(axis=0)
    scores = np.pad(scores * np.linalg.norm(v[inside], axis=-1), 1)
    whole = np.full(N, np.inf)
    whole[inside] = (scores[:-2] + scores[1:-1] + scores[2:]) / 3
    return whole


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("first", "last"), [(2, 3), (0, 0)])
def test_retains_what_the_equations_retain(first, last):
    """Rows of different lengths, one without tokens that take part, three query heads for each of two kv heads."""
    heads, group, size, lengths = 2, 3, 30, np.array([30, 17, 3])
    policy = parse("non_causal_attention:budget=9,chunk=7,sinks=2,recent=3")
    policy = replace(policy, score=NonCausalAttention(7, first, last))
    q, k, v = one_layer.random_streams(4, 3, heads, group, size)
    _, entries = one_layer.read(policy, lengths, size, q, k, v)
    for row, length in enumerate(lengths):
        for head, held in enumerate(one_layer.held(entries, row)):
            own, text = slice(head * group, (head + 1) * group), slice(size - length, None)
            scores = received(q[row, own, text], k[row, head, text], v[row, head, text], 7, first, last)
            scores[[*range(min(2, length)), *range(max(0, length - 3), length)]] = np.inf
            assert held == sorted(np.argsort(-scores, kind="stable")[: min(9, length)].tolist())


def test_sums_of_a_prompt_in_pieces():
    """Those of chunks that are cut: of queries that an earlier call had, and of tokens that were the last ones then."""
    score, ends, lengths = NonCausalAttention(5, sinks=2, recent=3), (0, 17, 18, 32), np.array([32, 11])
    q, k, v = one_layer.random_streams(4, 2, 2, 2, 32)
    positions = np.maximum(np.arange(32) - (32 - lengths[:, None]), -1)
    state = score.init(LayerShape(2, 4, 2, 8, jnp.dtype("float32"), 1, 32))
    whole, _ = read_piece(score, q, k, v, positions, state, 0, 32)
    for first, stop in pairwise(ends):
        state = read_piece(score, q, k, v, positions, state, first, stop)
    for row, length in enumerate(lengths):
        inside = np.s_[row, :, 32 - length + 2 : 29]
        assert np.ptp(whole[inside]) > 0.1
        np.testing.assert_allclose(state[0][inside], whole[inside], rtol=1e-5)


@partial(jax.jit, static_argnames=("score", "first", "stop"))
def read_piece(score, q, k, v, positions, state, first, stop):
    """The score's state after the tokens in some columns, where later slots are empty."""
    seen = jnp.where(jnp.arange(positions.shape[1]) < stop, positions, -1)
    entries = Slots(k, v, jnp.broadcast_to(seen[:, None], k.shape[:3]), jnp.zeros(k.shape[:2], int), *state)
    own = positions[:, first:stop]
    given = own, jnp.zeros((*q.shape[:2], stop - first)), None, jnp.sum(own >= 0, axis=1), one_layer.moment(0).layer
    return score.observe(entries, Attended(q[:, :, first:stop], *given))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "piece"), [("non_causal_attention", 4), ("compactor", 9)])
def test_a_prompt_in_pieces(preset, piece):
    """Pieces shorter and longer than the chunks of 5 tokens, which they cut: the scores are those of the whole."""
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11)]
    spec = f"{preset}:budget=9,chunk=5,sinks=2,recent=3"
    whole, pieces = (tiny.prefill(params, spec, rows, 32, chunk=size)[1] for size in (None, piece))
    assert [tiny.held(whole, row) for row in range(2)] == [tiny.held(pieces, row) for row in range(2)]
