"""Keyformer and H2O against a literal sum over rows; the noise against the distribution's moments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.keyformer import gumbel, position_bits, query_bits
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import NoisyAttention
from kvjax.policy import Attended, LayerShape
from tests import tiny
from tests.dense import assert_close
from tests.methods.literal_heads import AccumulatingHead, Generation
from tests.methods.reference import softmax


def draws_of(keys, positions):
    """The noise of all pairs of these positions, the query's first."""
    return np.asarray(gumbel(query_bits(keys, positions[:, None]), position_bits(positions)))


@pytest.mark.slow
def test_noise_is_gumbel_and_a_pair_s_own():
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2))[:, None, None]
    pairs = draws_of(keys, jnp.arange(400))
    for draws in (pairs, pairs[:, ::7], pairs[:, :, 3], np.diagonal(pairs, axis1=1, axis2=2)):
        assert abs(draws.mean() - np.euler_gamma) < 6 * 1.2825 / draws.size**0.5
        assert abs(draws.std() - np.pi / 6**0.5) < 8 / draws.size**0.5
    flat = pairs.reshape(2, -1)
    for one, other in ((pairs[0], pairs[1]), (pairs[0], pairs[0].T), (pairs[:, 1:], pairs[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1] - (400 / one.size if one is pairs[0] else 0)) < 0.02
    assert len(np.unique(flat)) > 0.98 * flat.size


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("group", "window", "temperature", "tiles"),
    [(4, 5, 1.5, (16, 8)), (1, 5, 1.5, None), (4, None, 1.5, None), (1, None, 1.5, (16, 8)), (2, None, 0.1, (16, 8))],
)
def test_is_the_literal_sum_over_rows(group, window, temperature, tiles, monkeypatch):
    """Two rows, one of them short; a prompt, then two steps with the temperature growing. `tiles`: rows and entries."""
    if tiles:
        monkeypatch.setattr("kvjax.methods.keyformer.ROWS", tiles[0])
        monkeypatch.setattr("kvjax.methods.keyformer.KEYS", tiles[1])
    rng = np.random.default_rng(group)
    heads, dim, size, scale = 2, 4, 40, 0.7
    score = NoisyAttention(temperature, growth=0.5, seed=3)
    shape = LayerShape(2, heads * group, heads, dim, jnp.dtype("float32"), dim, size + 2)
    q = rng.normal(size=(2, heads * group, size + 2, dim)).astype(np.float32)
    k = rng.normal(size=(2, heads, size + 2, dim)).astype(np.float32)
    positions = np.stack([np.arange(size + 2), np.arange(size + 2) - 30])
    positions[positions < 0] = -1
    state = score.init(shape)
    layer = AttentionLayer(1, Rope(1e4), window, scale, jnp.zeros((heads * group, dim, 1)))
    for rows, decoding in ((slice(0, size), False), (slice(size, size + 1), True), (slice(size + 1, size + 2), True)):
        seen = np.where(np.arange(size + 2) < rows.stop, positions, -1)
        entries = Slots(k, k, np.broadcast_to(seen[:, None], k.shape[:3]), np.zeros((2, heads)), *state)
        lengths = (positions[:, rows] >= 0).sum(1)
        observed = (
            q[:, :, rows],
            positions[:, rows],
            np.zeros(q[:, :, rows].shape[:3], np.float32),
            None,
            lengths,
            layer,
        )
        attended = Attended(*observed, decoding=decoding)
        state = jax.jit(lambda entries, attended=attended: score.observe(entries, attended))(entries)
    layer = jax.random.fold_in(jax.random.key(3), 1)
    for row in range(2):
        for head in range(heads):
            expected = np.zeros(size + 2)
            for g in range(group):
                key = jax.random.key_data(jax.random.fold_in(layer, head * group + g))
                draws = draws_of(key, jnp.asarray(positions[row]))
                for r, at in enumerate(positions[row]):
                    if at < 0:
                        continue
                    past = [c for c, p in enumerate(positions[row]) if 0 <= p <= at and (not window or p > at - window)]
                    logits = k[row, head, past] @ q[row, head * group + g, r] * scale + draws[r, past]
                    expected[past] += softmax(logits / (temperature + 0.5 * max(0, r + 1 - size))) / group
            np.testing.assert_allclose(state[0][row, head], expected, atol=1e-4)


def drawn(layer, head, group):
    """The noise of a kv head's query heads, from the seed 5."""
    keys = jax.random.fold_in(jax.random.key(5), layer)
    keys = jnp.stack([jax.random.key_data(jax.random.fold_in(keys, head * group + g)) for g in range(group)])
    table = draws_of(keys[:, None, None], jnp.arange(32))
    return lambda query, positions: table[:, query, positions]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (
            "keyformer:budget=12,recent=4,temperature=1.5,growth=0.25,seed=5",
            {"recent": 4, "tau": lambda decoded: 1.5 + 0.25 * decoded, "noise": drawn},
        ),
        ("h2o:budget=12,recent=4,sinks=2,every=3", {"recent": 4, "sinks": 2, "every": 3}),
        ("h2o:budget=12,recent=4", {"recent": 4}),
        ("keyformer:noise=none,growth=0,budget=12,recent=4", {"recent": 4}),
    ],
)
def test_retains_the_largest_literal_sums(policy, options):
    """Two rows, one of them shorter, after the prompt and after each of six steps."""
    params, rng = tiny.decoder(), np.random.default_rng(0)
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in (24, 17)], rng.integers(0, tiny.VOCAB, (6, 2))
    group = params.config.num_heads // params.config.num_kv_heads

    def make(layer, head):
        noise = {"noise": options["noise"](layer, head, group)} if "noise" in options else {}
        return AccumulatingHead(budget=12, **{**options, **noise})

    generations = [Generation(params, make) for _ in rows]
    logits, cache = tiny.prefill(params, policy, rows, 24)
    expected = [generation.prompt(row) for generation, row in zip(generations, rows, strict=True)]
    for token in tokens:
        assert [tiny.held(cache, row) for row in range(2)] == [generation.held() for generation in generations]
        assert_close(logits, np.stack(expected), 1e-4, 1e-3)
        logits, cache = tiny.step(params, cache, token, np.ones(2, bool))
        expected = [generation.decode(own) for generation, own in zip(generations, token, strict=True)]
    assert [tiny.held(cache, row) for row in range(2)] == [generation.held() for generation in generations]
