"""Hybrid models: the states of recurrent layers are those of the text, whatever cuts, pads or compresses it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.tiny import VOCAB, full_logits, hybrid

LENGTHS = (1, 3, 20, 70)
NEW = 4
RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, VOCAB, n) for n in LENGTHS]
MORE = [RNG.integers(0, VOCAB, n) for n in (30, 1, 2, 5)]


def answered(prompt, **options) -> kvjax.Generation:
    return kvjax.generate(hybrid(), prompt, max_new_tokens=NEW, log_probs=True, **options)


def assert_answers_follow(texts: list[np.ndarray], answer: kvjax.Generation) -> None:
    """The answer has the log-probabilities of the layers run over the whole text, which ends with it."""
    assert answer.log_probs is not None
    for b, logits in enumerate(full_logits(hybrid(), texts, 128)):
        new = jax.nn.log_softmax(jnp.asarray(logits[-NEW - 1 : -1]))
        np.testing.assert_allclose(answer.log_probs[b], np.asarray(new)[np.arange(NEW), texts[b][-NEW:]], atol=1e-4)


def joined(*parts) -> list[np.ndarray]:
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def assert_states_equal(ours: kvjax.KVCache, theirs: kvjax.KVCache, atol: float = 0.0) -> None:
    assert jax.tree.structure(ours.recurrent) == jax.tree.structure(theirs.recurrent)
    for one, other in zip(jax.tree.leaves(ours.recurrent), jax.tree.leaves(theirs.recurrent), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


@pytest.mark.long
def test_answers_and_later_turns_follow_the_whole_text():
    first = answered(ROWS)
    texts = joined(ROWS, first.tokens)
    assert_answers_follow(texts, first)
    second = answered(MORE, cache=first.cache)
    assert_answers_follow(joined(texts, MORE, second.tokens), second)
    again = answered(MORE, cache=first.cache)  # nothing was donated
    np.testing.assert_array_equal(again.tokens, second.tokens)


@pytest.mark.long
def test_a_cache_of_another_model_is_refused():
    cache = kvjax.prefill(hybrid((0, 2, 1)), [[1, 2, 3]], policy="full")
    with pytest.raises(ValueError, match=r"recurrent states of the shapes .*: the model needs \[\[\(4, 8, 6\), "):
        answered([[1]], cache=cache)


@pytest.mark.long
def test_a_prompt_in_chunks():
    whole, pieces = answered(ROWS), answered(ROWS, chunk=16)
    np.testing.assert_array_equal(pieces.tokens, whole.tokens)
    assert_states_equal(pieces.cache, whole.cache, atol=1e-5)


@pytest.mark.long
def test_rows_without_tokens_keep_their_state():
    cache = kvjax.prefill(hybrid(), ROWS, policy="full")
    for columns in (1, 3):
        _, after = kvjax.extend(hybrid(), kvjax.with_room(cache, 8), np.ones((4, columns), int), np.array([0, 1, 0, 1]))
        for one, other in zip(jax.tree.leaves(after.recurrent), jax.tree.leaves(cache.recurrent), strict=True):
            np.testing.assert_array_equal(one[0::2], other[0::2])
            assert (np.asarray(one)[1::2] != np.asarray(other)[1::2]).any()


@pytest.mark.long
@pytest.mark.slow(first=1)
def test_every_policy_leaves_the_states_alone(policy):
    """Of a prompt, whatever is scored, replayed, compressed or allocated. Attention before a state stays in full."""
    cache = kvjax.prefill(hybrid(), ROWS[2:], policy=policy)
    assert_states_equal(cache, kvjax.prefill(hybrid(), ROWS[2:], policy="full"), atol=1e-5)
    answer = kvjax.generate(hybrid(), MORE[2:], cache=cache, max_new_tokens=NEW, log_probs=True)
    assert np.isfinite(answer.log_probs).all()
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves((cache.entries, cache.recurrent)))


@pytest.mark.long(first=1)
@pytest.mark.parametrize("text", ["full", "h2o:budget=16", "dynamickv:budget=16", "adakv:base=h2o,base.budget=16"])
def test_plans_count_the_states(text):
    params = hybrid((2,) if text == "full" else (2, 0, 1))
    cache = kvjax.generate(params, ROWS, max_new_tokens=NEW, policy=text).cache
    config = params.config
    plan = kvjax.plan_cache(config, cache.policy, batch=4, length=max(LENGTHS), new_tokens=NEW, dtype=jnp.float32)
    assert plan.nbytes == cache.nbytes
    states = 4 * config.recurrence.nbytes(jnp.float32)
    assert states == sum(x.nbytes for x in jax.tree.leaves(cache.recurrent)) > 0


@pytest.mark.long
def test_saved_caches_hold_the_states(tmp_path: Path):
    cache = answered(ROWS, policy="h2o:budget=16").cache
    kvjax.save_cache(tmp_path / "cache", cache, hybrid())
    restored = kvjax.restore_cache(tmp_path / "cache", hybrid())
    assert_states_equal(restored, cache)
    np.testing.assert_array_equal(answered(MORE, cache=restored).tokens, answered(MORE, cache=cache).tokens)


@pytest.mark.slow
def test_a_prompt_that_is_read_once_for_several_policies():
    policies = ["snapkv:budget=16,window=4", "h2o:budget=16", "dynamickv:budget=16"]
    for once, text in zip(kvjax.prefill_each(hybrid(), ROWS, policies=policies), policies, strict=True):
        alone = kvjax.prefill(hybrid(), ROWS, policy=text)
        assert_states_equal(once, alone, atol=1e-5)
        ours, theirs = (answered(MORE, cache=cache) for cache in (once, alone))
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
