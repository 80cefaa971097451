"""Layers that read the entries of another layer, as those of Gemma 4: of a prompt, one token runs through them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.attend import rotated
from kvjax.gates.files import Gates
from kvjax.models import AttentionLayer, Decoder, KvHeads, Readers, Rope
from tests.models.everything import LENGTHS, NEW, ROWS, assert_full_within_budget, everything
from tests.tiny import VOCAB, decoder, full_logits, random_gates

RNG = np.random.default_rng(0)
PROMPTS = RNG.integers(0, VOCAB, (8, 40))


@cache
def reading(**facts: Any) -> Decoder:
    """Two layers, with a window and without, which three others read in another order. All have inputs."""
    config = decoder(heads=8, kv_heads=2, windows=(24, None)).config
    readers = {"readers": Readers((1, 0, 1), 20), "layer_input_size": 6, "qk_norm": True}
    return Decoder(replace(config, **readers | facts), nnx.Rngs(0))


@cache
def two_kinds() -> Decoder:
    return reading(window_heads=KvHeads(4, 16), window_rope=Rope(100.0))


@pytest.mark.long
@pytest.mark.slow(first=1)
def test_policies(policy):
    """Texts within the budget have the logits of the layers run over the whole text."""
    params = everything(readers=Readers((1, 0, 1), 20))
    if isinstance(policy.score, kvjax.parts.Attribution):
        with pytest.raises(ValueError, match="measures hidden states behind the last layer: expected another score"):
            kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW)
        return
    cache = assert_full_within_budget(params, policy)
    sizes = {"batch": len(ROWS), "length": max(LENGTHS), "new_tokens": NEW}
    assert cache.nbytes == kvjax.plan_cache(params.config, policy, **sizes, dtype="float32").nbytes
    assert len(cache.entries) == 2


def answers(params: Decoder, text: str, prompt: Any = PROMPTS, **options: Any) -> kvjax.Generation:
    return kvjax.generate(params, prompt, policy=text, max_new_tokens=NEW, log_probs=True, **options)


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    "text", ["streaming_llm:budget=12,positions=in_cache", "snapkv:budget=12,window=4", "dynamickv:budget=12"]
)
def test_the_first_token_is_that_of_the_whole_prompt_and_the_second_that_of_what_is_retained(text):
    """The second against the layers run over the whole text, of which the last token sees what the cache retains."""
    params = reading()
    answer = kvjax.generate(params, PROMPTS[:1], policy=text, max_new_tokens=2, log_probs=True)
    first, second = answer.tokens[0]
    assert answer.log_probs is not None
    whole = jax.nn.log_softmax(full_logits(params, [PROMPTS[0]], 40)[0][-1])
    np.testing.assert_allclose(answer.log_probs[0, 0], whole[first], atol=1e-5)
    tokens, seen = np.append(PROMPTS[0], first), np.zeros((2, 2, 41), bool)
    for layer, head in np.ndindex(2, 2):  # the second token has no entry yet
        seen[layer, head, answer.cache.retained(layer, head)] = True
    attend = partial(_seeing, by_place=answer.cache.policy.positions == "in_cache", seen=jnp.asarray(seen))
    hidden, _ = jax.jit(lambda params, tokens: params(tokens, attend))(params, jnp.asarray(tokens)[None])
    retained = jax.nn.log_softmax(params.logits(hidden[0, -1]))
    np.testing.assert_allclose(answer.log_probs[0, 1], retained[second], atol=1e-5)
    assert abs(retained[second] - jax.nn.log_softmax(full_logits(params, [tokens], 41)[0][-1])[second]) > 1e-3


def _seeing(layer: AttentionLayer, q: Any, k: Any, v: Any, cache: Any, *, by_place: bool, seen: Any) -> tuple[Any, Any]:
    """Causal attention of one row, of which the last token sees some tokens in each kv head.

    Args:
        by_place: whether it rotates keys by their places among these, and not by their positions.
        seen: [L, H, N].
    """
    N, own = q.shape[2], seen[layer.index]
    at = jnp.arange(N)
    distance = at[:, None] - at
    visible = (distance >= 0) & (distance < (layer.window or N))
    whole = _attention(layer, q, k, v, jnp.broadcast_to(at, own.shape), visible)
    places = jnp.cumsum(own, axis=-1) - 1 if by_place else jnp.broadcast_to(at, own.shape)
    last = _attention(layer, q, k, v, places, (visible & own[:, None])[:, None])
    return jnp.concatenate([whole[:, :, :-1], last[:, :, -1:]], axis=2), cache


def _attention(layer: AttentionLayer, q: Any, k: Any, v: Any, places: Any, visible: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    q = rotated(layer, q, jnp.repeat(places, group, axis=0)[None], None).reshape(1, -1, group, *q.shape[2:])
    logits = jnp.einsum("bhgqd,bhkd->bhgqk", q, rotated(layer, k, places[None], None)) * layer.scale
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(1, -1, *q.shape[3:])


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", ["h2o:budget=20", "full", "adakv:base=snapkv,base.budget=20,base.window=4,groups=2"])
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_mesh(text):
    """The tokens and retained entries are those of one device."""
    params = reading() if text.startswith("adakv") else two_kinds()
    one, many = answers(params, text), answers(kvjax.shard(params, kvjax.make_mesh(data=4, model=2)), text)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.log_probs, one.log_probs, atol=1e-5)
    np.testing.assert_array_equal(many.cache.retained_mask(), one.cache.retained_mask())


@pytest.mark.long
def test_chunks_and_turns():
    """Also of a turn into a pool, and of a turn of one token."""
    params, prompts, text = reading(), PROMPTS[:2], "snapkv:budget=20,window=4"
    whole, chunks = answers(params, text, prompts), answers(params, text, prompts, chunk=16)
    np.testing.assert_array_equal(chunks.tokens, whole.tokens)
    np.testing.assert_allclose(chunks.log_probs, whole.log_probs, atol=1e-5)
    for text in ("full", "dynamickv:budget=80"):
        turn, said = answers(params, text, prompts), prompts
        for more in (prompts[:, :5], prompts[:, :1]):
            said = np.concatenate([said, turn.tokens, more], axis=1)
            turn = kvjax.generate(params, more, cache=turn.cache, max_new_tokens=NEW, log_probs=True)
            logits = full_logits(params, list(np.concatenate([said, turn.tokens], axis=1)), 80)
            for row, own in enumerate(logits):
                expected = jax.nn.log_softmax(own[said.shape[1] - 1 : -1])[np.arange(NEW), turn.tokens[row]]
                np.testing.assert_allclose(turn.log_probs[row], expected, atol=1e-4)


@pytest.mark.long
def test_engine_and_saved_cache(tmp_path: Path):
    params, text = two_kinds(), "snapkv:budget=20,window=4"
    expected = kvjax.generate(params, PROMPTS[:1], policy=text, max_new_tokens=NEW)
    with kvjax.Engine(params, policy=text, rows=2, max_prompt=64, max_new_tokens=NEW) as engine:
        answer = engine.submit(PROMPTS[0], max_new_tokens=NEW).result()
        np.testing.assert_array_equal(answer.tokens, expected.tokens[0])
    kvjax.save_cache(tmp_path / "cache", expected.cache, params)
    again = kvjax.restore_cache(tmp_path / "cache", params)
    ours, theirs = (kvjax.generate(params, [[5]], cache=x, max_new_tokens=NEW) for x in (again, expected.cache))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


@pytest.mark.slow
def test_a_prompt_that_is_read_once_for_several_policies():
    policies = ["snapkv:budget=16,window=4", "dynamickv:budget=16"]
    for once, text in zip(kvjax.prefill_each(reading(), PROMPTS, policies=policies), policies, strict=True):
        alone = kvjax.prefill(reading(), PROMPTS, policy=text)
        ours, theirs = (kvjax.generate(reading(), PROMPTS[:, :1], cache=x, max_new_tokens=NEW) for x in (once, alone))
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_gates_and_statistics_are_refused():
    gates: Gates = next(iter(random_gates(2, 2, 4)))
    with pytest.raises(ValueError, match="gates for a model whose last layers, 3, read the entries of others"):
        kvjax.with_gates(reading(), gates)
    with pytest.raises(ValueError, match="statistics for a model whose last layers, 3, read"):
        kvjax.with_statistics(reading(), {"query_mean": np.zeros((2, 8, 8), np.float32)})
