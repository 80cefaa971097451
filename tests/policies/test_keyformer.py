"""Keyformer's score against a literal sum over rows, its noise against the distribution's moments, and H2O without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import LayerCache
from kvjax.parts import NoisyAttention
from kvjax.parts.noisy import gumbel
from kvjax.policies import parse
from kvjax.protocols import Attended, LayerShape
from tests import tiny
from tests.policies.reference import softmax


def test_noise_is_gumbel_and_a_pair_s_own():
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2))[:, None, None]
    pairs = np.asarray(gumbel(keys, jnp.arange(400)[:, None], jnp.arange(400)))
    for draws in (pairs, pairs[:, ::7], pairs[:, :, 3], np.diagonal(pairs, axis1=1, axis2=2)):
        assert abs(draws.mean() - np.euler_gamma) < 6 * 1.2825 / draws.size**0.5
        assert abs(draws.std() - np.pi / 6**0.5) < 8 / draws.size**0.5
    flat = pairs.reshape(2, -1)
    for one, other in ((pairs[0], pairs[1]), (pairs[0], pairs[0].T), (pairs[:, 1:], pairs[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1] - (400 / one.size if one is pairs[0] else 0)) < 0.02
    assert len(np.unique(flat)) > 0.98 * flat.size


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_is_the_literal_sum_over_rows(group, window):
    """Two rows, one of them short; a prompt, then two steps with the temperature growing."""
    rng = np.random.default_rng(group)
    heads, dim, size, scale = 2, 4, 40, 0.7
    score = NoisyAttention(temperature=1.5, growth=0.5, seed=3)
    shape = LayerShape(2, heads * group, heads, dim, jnp.dtype("float32"))
    q = rng.normal(size=(2, heads * group, size + 2, dim)).astype(np.float32)
    k = rng.normal(size=(2, heads, size + 2, dim)).astype(np.float32)
    positions = np.stack([np.arange(size + 2), np.arange(size + 2) - 30])
    positions[positions < 0] = -1
    state = score.init_slots(shape, size + 2), score.init_rows(shape)
    for rows, decoding in ((slice(0, size), False), (slice(size, size + 1), True), (slice(size + 1, size + 2), True)):
        seen = np.where(np.arange(size + 2) < rows.stop, positions, -1)
        entries = LayerCache(k, k, np.broadcast_to(seen[:, None], k.shape[:3]), np.zeros((2, heads)), *state)
        lengths = (positions[:, rows] >= 0).sum(1)
        asked = q[:, :, rows], q[:, :, rows], positions[:, rows], np.zeros((2, heads * group, 1)), None, lengths
        state = score.observe(entries, Attended(*asked, scale, window, layer=1, decoding=decoding))
    layer = jax.random.fold_in(jax.random.key(3), 1)
    for row in range(2):
        for head in range(heads):
            expected = np.zeros(size + 2)
            for g in range(group):
                key = jax.random.key_data(jax.random.fold_in(layer, head * group + g))
                draws = np.asarray(gumbel(key, jnp.asarray(positions[row])[:, None], jnp.asarray(positions[row])))
                for r, at in enumerate(positions[row]):
                    if at < 0:
                        continue
                    past = [c for c, p in enumerate(positions[row]) if 0 <= p <= at and (not window or p > at - window)]
                    logits = k[row, head, past] @ q[row, head * group + g, r] * scale + draws[r, past]
                    expected[past] += softmax(logits / (1.5 + 0.5 * max(0, r + 1 - size))) / group
            np.testing.assert_allclose(state[0][row, head], expected, atol=1e-4)


def test_without_noise_and_growth_it_is_h2o():
    rng = np.random.default_rng(0)
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in (24, 17)], rng.integers(0, tiny.VOCAB, (6, 2))
    held = []
    for name in ("keyformer:noise=none,growth=0,", "h2o:", "keyformer:"):
        _, cache = tiny.prefill(tiny.decoder(), f"{name}budget=12,recent=4", rows, 24)
        for token in tokens:
            _, cache = tiny.step(tiny.decoder(), cache, token, np.ones(2, bool))
        held.append([tiny.held(cache, row) for row in range(2)])
    assert held[0] == held[1]
    assert held[0] != held[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("temperature=0", "temperature=0: accepted is a number, above 0"),
        ("growth=-0.1", "growth=-0.1: accepted is a number, 0 or more"),
        ("noise=normal", "noise='normal'.*'gumbel'"),
        ("seed=-1", "seed=-1"),
    ],
)
def test_what_makes_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        parse(f"keyformer:{options}")
