"""Every policy on a decoder that has all that a family may add to Llama: windows, kinds of RoPE, soft caps, norms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder, Mixture, Rope
from tests.tiny import VOCAB, decoder, full_logits, held

LENGTHS = (12, 20, 60)
NEW = 4
WINDOW = 16
FACTS = {
    "window_rope": Rope(100.0),
    "unrotated": (1,),
    "qk_norm": True,
    "post_norm": True,
    "unit_offset_norms": True,
    "activation": "gelu_tanh",
    "attention_scale": 0.5,
    "attention_softcap": 1.0,
    "attention_sinks": True,
    "logit_softcap": 4.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.8,
    "logit_divisor": 0.5,
    "mixture": Mixture(experts=4, per_token=2, size=12, dense_layers=(1,), biased=True, limit=0.5),
}
ROWS = [np.random.default_rng(n).integers(0, VOCAB, n) for n in LENGTHS]


@cache
def everything() -> Decoder:
    """Two layers: with a window, its own RoPE and experts, and with full attention, no RoPE and an MLP."""
    config = replace(decoder(windows=(WINDOW, None)).config, **FACTS)
    noise = np.random.default_rng(0)  # or norms would be ones, and 1 + 0
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + 0.3 * noise.normal(size=x.shape).astype(x.dtype)),
        Decoder(config, nnx.Rngs(0)),
    )


@pytest.mark.slow
def test_the_facts_matter():
    """Without any one of them the decoder computes other logits."""
    params = everything()
    expected = full_logits(params, [ROWS[1]], 20)[0]
    neutral = type(params.config).__dataclass_fields__
    for name in FACTS.keys() - {
        "post_norm",
        "qk_norm",
        "attention_sinks",
        "mixture",
    }:  # whose parameters would be missing
        graph, state = nnx.split(params)
        other = nnx.merge(graph, state)
        other.config = replace(params.config, **{name: neutral[name].default})
        for layer in other.layers:
            layer.residual_scale, fed = other.config.residual_scale, layer.mlp or layer.experts
            fed.activation = other.config.activation
        for norm in (x for _, x in nnx.iter_modules(other) if hasattr(x, "unit_offset")):
            norm.unit_offset = other.config.unit_offset_norms
        assert np.abs(full_logits(other, [ROWS[1]], 20)[0] - expected).max() > 1e-2, name


@pytest.mark.slow(first=1)
def test_policies_on_all_facts(policy):
    """Texts within the budget have the logits of full attention, beside one that is compressed to it."""
    params = everything()
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert np.isfinite(answer.log_probs).all()
    if policy.limited(0):
        most = 24 if policy.every else 24 + NEW
        assert np.mean([len(positions) for heads in held(answer.cache, 2) for positions in heads]) <= most
    if policy.positions == "original":
        texts = [np.concatenate(pair) for pair in zip(ROWS[:2], answer.tokens[:2], strict=True)]
        room = np.minimum(*(policy.capacity(layer, np.array(LENGTHS), 2) for layer in range(2)))
        for b, logits in enumerate(full_logits(params, texts, 24)):
            if room[b] < LENGTHS[b] + (NEW if policy.every else 0):
                assert b == 1
                assert "Pyramid" in repr(policy.budget)  # whose last layer has room for the first text alone
                continue
            new = jax.nn.log_softmax(jnp.asarray(logits[LENGTHS[b] - 1 : LENGTHS[b] + NEW - 1]))
            expected = np.asarray(new)[np.arange(NEW), answer.tokens[b]]
            np.testing.assert_allclose(answer.log_probs[b], expected, atol=1e-4)


@pytest.mark.slow
def test_a_prompt_that_is_read_once_for_two_policies():
    """The layers run one by one there, and layers of a kind share a program."""
    params, policies = everything(), ["snapkv:budget=24,window=4", "h2o:budget=24"]
    question = [np.array([5])] * len(ROWS)
    for once, text in zip(kvjax.prefill_each(params, ROWS, policies=policies), policies, strict=True):
        both = once, kvjax.prefill(params, ROWS, policy=text)
        ours, alone = (kvjax.generate(params, question, cache=x, max_new_tokens=2, log_probs=True) for x in both)
        np.testing.assert_array_equal(ours.tokens, alone.tokens)
        np.testing.assert_allclose(ours.log_probs, alone.log_probs, atol=1e-5)
