"""A cache of a model over latents holds each latent once: bytes, and the same answers as with values of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import FromKeys, Layers
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, Latent
from kvjax.parts import Quantized
from kvjax.policy import Policy
from kvjax.policy.suits import check_suits
from kvjax.reading.prompt import Batch, read_prompt
from tests.policy.presets import ALL, ROOM, SIZE
from tests.products import part
from tests.test_prefill_each import assert_same
from tests.tiny import (
    LATENT,
    VOCAB,
    empty,
    full_logits,
    held,
    latent_config,
    latents,
    left_pad,
    random_gates,
    random_statistics,
    step,
)

RNG = np.random.default_rng(3)
ROWS = [RNG.integers(0, VOCAB, n) for n in (SIZE, 7, 15)]
QUESTIONS = [[5, 6], [7], [8, 9, 10]]
NEW = 6
# Of each layout, one that reads keys again, one that is quantised, and scores that look at values in each way.
DISTINCT = (
    "full",
    "streaming_llm:budget=12,positions=in_cache,every=3",
    "morphkv:budget=12,window=4,fusion=max,every=3,dense_layers=1",
    "d2o:budget=12,recent=2,layer_budgets=False,merge.weights=code,every=3",
    "expected_attention:budget=12,sinks=2,future=8,epsilon=0.01",
    "lagkv:budget=12,sinks=1,lag=3,every=2",
    "kvcompose:budget=0.5,score.source=self,score.rows=mean,structured=False,min_tokens=1,score.value_norm=vo",
    "adakv:base=h2o,base.budget=12,base.recent=3,alpha=0.5,formula=kvpress",
    "kvzip:budget=0.5,sinks=2,score.chunk=10,score.instruction='',score.starting='',score.suffix=''",
    "criticalkv:base=h2o,base.budget=12,base.recent=3,first=0.4",
    "quantize:policy=morphkv,policy.budget=12,policy.window=4",
    "capkv:budget=12,sinks=2,future=8",
    "cur:budget=12,window=5,sinks=2,every=2",
    "restkv:budget=12,window=4,kernel=3",
    "vase:budget=12,window=3,kernel=3,sinks=1,every=3",
)
FORMS = (
    "full",
    "snapkv:budget=12,window=4",
    "h2o:budget=12",
    "adakv:base=h2o,base.budget=12",
    "quantize:policy=morphkv,policy.budget=12,policy.window=4,bits=4",
    "attention_matching:base=snapkv,base.budget=12,base.window=4",
)


@cache
def attached() -> Decoder:
    """The tiny model with random gates and statistics, with which all presets run but those with learned tokens."""
    params = latents()
    for gates in random_gates(2, 1, 8):
        params = kvjax.with_gates(params, gates)
    return kvjax.with_statistics(params, random_statistics(params.config))


def fits(spec: str) -> bool:
    """Tells whether a preset suits a model over latents, whose layers have one kv head."""
    policy = policies.parse(spec)
    try:
        check_suits(policy, latent_config(), 1)
    except ValueError:
        return False
    return policy.score.needs.gates != "lookaheadkv" and policy.learned is None


def empty_caches(policy: Policy, lengths: np.ndarray) -> tuple[KVCache, KVCache]:
    """A cache as it is, and one with values of their own."""
    once = empty(latents(), policy, lengths, SIZE)
    own = (replace(layer, values=policy.storage.store(layer.plain().values)) for layer in once.entries)
    return once, replace(once, entries=Layers(tuple(own)))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("spec", part(filter(fits, ALL), DISTINCT))
def test_policies_retain_and_answer_as_with_values_of_their_own(spec):
    policy = policies.parse(spec)
    if isinstance(policy.storage, Quantized):  # no scale is of rotated channels and of others
        policy = replace(policy, storage=replace(policy.storage, group=LATENT.rotated))
    tokens, lengths = left_pad(ROWS, SIZE)
    once, apart = empty_caches(policy, lengths)
    assert isinstance(once.entries.stored[1], FromKeys) is not policy.changes_entries
    if policy.changes_entries:  # the caches are equal
        return
    read = partial(read_prompt, attached(), batch=Batch(tokens, lengths), room=ROOM)
    (logits, once), (expected, apart) = read(once), read(apart)
    assert isinstance(once.entries.stored[1], FromKeys)
    for _ in range(NEW):
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        np.testing.assert_array_equal(token := logits.argmax(-1), expected.argmax(-1))
        assert [held(once, row) for row in range(3)] == [held(apart, row) for row in range(3)]
        assert once.nbytes < apart.nbytes
        (logits, once), (expected, apart) = (step(attached(), x, token, np.ones(3, bool)) for x in (once, apart))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("full", 1152),
        ("snapkv:budget=1024", 1152),
        ("morphkv:budget=1024", 1152),
        ("quantize:bits=8", 576 + 36),
        ("quantize:bits=4", 288 + 36),
        ("adakv:base=snapkv,base.budget=1024", 1152),
        ("cam:budget=1024", 2304),
        ("d2o:budget=1024,layer_budgets=False", 2304),
        ("attention_matching:base=snapkv,base.budget=1024", 2304),
    ],
)
def test_bytes_per_entry_of_deepseek_v3(text, size):
    """64 rotated channels and 512 of the latent, in bfloat16."""
    config = latent_config(Latent(rank=512, rotated=64, unrotated=128, value=128, query_rank=1536), heads=128)
    plan = kvjax.plan_cache(config, policies.parse(text), batch=1, length=4096, new_tokens=100, dtype="bfloat16")
    stored = jax.tree.leaves(plan.entries.stored)  # of a layer, or of the pool
    assert sum(x.size * x.dtype.itemsize for x in stored) == stored[0].shape[2] * size
    if text == "full":
        assert config.bytes_per_token("bfloat16") == 2 * size
        assert plan.nbytes == 2 * (stored[0].shape[2] * (size + 4) + 4)  # a position of each slot, and a capacity


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("text", FORMS)
def test_saved_caches_go_on(text, tmp_path: Path):
    """So do caches that were read in chunks, in bfloat16 too."""
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), latents())
        cache = kvjax.prefill(params, ROWS, policy=text, chunk=16)
        kvjax.save_cache(tmp_path / str(dtype.dtype), cache, params)
        restored = kvjax.restore_cache(tmp_path / str(dtype.dtype), params, policy=policies.parse(text))
        assert_same(restored, cache)
        ours, theirs = (
            kvjax.generate(params, QUESTIONS, cache=x, max_new_tokens=NEW, log_probs=True) for x in (restored, cache)
        )
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert np.isfinite(ours.log_probs).all()


@pytest.mark.long
def test_turns_are_one_text():
    """Under `full`, a question behind an answer is answered as in plain causal attention over all that was said."""
    params = latents()
    first = kvjax.generate(params, ROWS, policy="full", max_new_tokens=NEW, chunk=16)
    second = kvjax.generate(params, QUESTIONS, cache=first.cache, max_new_tokens=NEW, log_probs=True)
    said = [np.concatenate(parts) for parts in zip(ROWS, first.tokens, QUESTIONS, second.tokens, strict=True)]
    for row, logits in enumerate(full_logits(params, said, 48)):
        expected = np.asarray(jax.nn.log_softmax(logits[len(said[row]) - NEW - 1 : -1]))
        np.testing.assert_array_equal(second.tokens[row], expected.argmax(-1))
        np.testing.assert_allclose(second.log_probs[row], expected.max(-1), atol=1e-4)


@pytest.mark.long
def test_a_prompt_that_is_read_once_for_policies_of_both_forms():
    texts = [text for text in FORMS if "quantize" not in text] + ["cam:budget=12", "d2o:budget=12,layer_budgets=False"]
    for text, ours in zip(texts, kvjax.prefill_each(latents(), ROWS, policies=texts), strict=True):
        assert_same(ours, kvjax.prefill(latents(), ROWS, policy=text))
