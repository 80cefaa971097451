"""KVCrush with bits per query head, on the model: against the algorithms in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.policies import h2o, kvcrush, snapkv
from kvjax.policy import Moment
from tests import tiny
from tests.methods.literal_crush import literal
from tests.methods.reference import Reader
from tests.methods.test_kvcrush import window_scores_of


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
    scores = policy.score.by_query_head(entries, Moment(cache.length, params.attention_layers[0]))
    ages = np.asarray(cache.length)[:, None, None] - np.asarray(entries.positions)
    expected = np.asarray(state.received / ages[:, :, None]).reshape(1, 8, -1)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
