"""KVCrush with bits per query head, on the model: against the algorithms in plain Python."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.kvcrush.query_heads import Watched, by_query_head
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import AccumulatedAttention, QueryHeadAttention
from kvjax.policies import h2o, kvcrush, snapkv
from kvjax.policy import Attended, LayerShape
from tests import tiny
from tests.methods.literal_crush import literal
from tests.methods.reference import Reader
from tests.methods.test_kvcrush import window_scores_of


def test_attention_from_each_query_head_adds_up():
    """Two texts, then a replayed one, which adds nothing; means are over the queries that could see an entry."""
    rng, (B, H, G, M, W, D) = np.random.default_rng(1), (2, 3, 2, 7, 4, 4)
    held, at = np.array([range(7), [-1, -1, *range(5)]]), np.array([range(3, 7), [-1, 2, 3, 4]])
    keys, state = rng.normal(size=(B, H, M, D)), rng.random((B, H, G, M))
    layer = AttentionLayer(0, Rope(1e4), None, 0.5, jnp.zeros(0))
    score = QueryHeadAttention(AccumulatedAttention())
    shape = LayerShape(B, H * G, H, D, jnp.dtype("float32"), 1, M)
    assert jax.tree.map(jnp.shape, score.init(shape)[0]) == Watched((B, H, G, M), (B, H, M))
    given = jnp.zeros((B, H, M))

    @partial(jax.jit, static_argnames="replayed")
    def observed(keys, state, q, lse, replayed):
        entries = Slots(keys, keys, jnp.broadcast_to(held[:, None], (B, H, M)), jnp.zeros((B, H), int), state)
        replay = (jnp.zeros(B), jnp.zeros(B)) if replayed else None
        after, _ = score.observe(entries, Attended(q, at, lse, given, jnp.array([4, 3]), layer, replay=replay))
        return after, by_query_head(replace(entries, per_slot=after))

    expected, found = state.copy(), Watched(jnp.asarray(state, jnp.float32), given)
    for replayed in (False, False, True):
        q = rng.normal(size=(B, H * G, W, D))
        seen = (held[:, None] >= 0) & (held[:, None] <= at[..., None])
        logits = np.einsum("bhgwd,bhmd->bhgwm", q.reshape(B, H, G, W, D), keys) / 2
        parts = np.where(seen[:, None, None], np.exp(logits), 0)
        total = np.maximum(parts.sum(axis=-1), 1e-30)
        expected += 0 if replayed else (parts / total[..., None]).sum(axis=3)
        lse = np.where(at[:, None] < 0, -np.inf, np.log(total).reshape(B, H * G, W))
        found, means = observed(keys.astype(np.float32), found, q.astype(np.float32), lse.astype(np.float32), replayed)
        np.testing.assert_allclose(found.received, expected, rtol=1e-5)
        queries = np.array([7, 5])[:, None] - held
        np.testing.assert_allclose(means, (expected / queries[:, None, None]).reshape(B, H * G, M), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["h2o", "snapkv"])
def test_bits_per_query_head_follow_the_attention_of_each(base):
    """Eight query heads on two kv heads: 8 bits per token, by what every prompt query gave, by the tokens' ages."""
    params, rng = tiny.decoder(8, 2), np.random.default_rng(12)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (44, 31, 12)]
    policy = {"h2o": h2o(20, recent=4), "snapkv": snapkv(20, window=4, pool="none")}[base]
    _, by_kv_head = tiny.prefill(params, kvcrush(policy, share=0.4), rows, 48)
    _, cache = tiny.prefill(params, kvcrush(policy, share=0.4, bits="query"), rows, 48)
    assert tiny.held(cache, 0) != tiny.held(by_kv_head, 0)
    for b, row in enumerate(rows):
        reader, n = Reader(params), len(row)
        reader.read(row)
        received = reader.weights(range(n), range(n))[0].sum(axis=2) / (n - np.arange(n))  # [H, G, N]
        if base == "h2o":
            scores = received.mean(axis=1) * (n - np.arange(n))
        else:
            scores = np.pad(window_scores_of(params, row, 4, 4).mean(axis=1), ((0, 0), (0, 4)))
        texts = [dict(enumerate(own)) for own in scores]
        queries = [[dict(enumerate(own)) for own in heads] for heads in received]
        expected = literal(texts, [20, 20], 0.4, protected=range(n - 4, n), queries=queries)
        assert tiny.held(cache, b)[0] == ([list(range(n))] * 2 if n <= 20 else expected)


@pytest.mark.slow
def test_bits_per_query_head_while_the_base_evicts():
    """Chunks of a prompt and a second turn see the attention of all queries; decoding is the base's own."""
    params, rng = tiny.decoder(8, 2), np.random.default_rng(13)
    row, more = rng.integers(0, tiny.VOCAB, 40), rng.integers(0, tiny.VOCAB, 6)
    policy = kvcrush(h2o(20, recent=4), share=0.4, bits="query")
    _, cache = tiny.prefill(params, policy, [row], 48)
    _, chunked = tiny.prefill(params, policy, [row], 48, chunk=16)
    assert tiny.held(cache, 0) == tiny.held(chunked, 0)
    state = cache.entries[0].per_slot
    np.testing.assert_allclose(state.received.mean(axis=2), state.base, atol=1e-5)
    for token in more:
        _, cache = tiny.step(params, cache, np.array([token]), np.ones(1, bool))
    state, entries = cache.entries[0].per_slot, cache.entries[0]
    np.testing.assert_allclose(state.received.mean(axis=2), state.base, atol=1e-5)
    scores = by_query_head(entries)
    ages = np.asarray(cache.length)[:, None, None] - np.asarray(entries.positions)
    expected = np.asarray(state.received / ages[:, :, None]).reshape(1, 8, -1)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
