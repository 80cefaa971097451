"""A decoder that has all that a family may add to Llama, and what every policy must do on it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    "value_norm": True,
    "keys_are_values": True,
    "layer_scalars": True,
    "layer_input_size": 6,
    "mixture": Mixture(experts=4, per_token=2, size=12, dense_layers=(1,), biased=True, limit=0.5),
}
ROWS = [np.random.default_rng(n).integers(0, VOCAB, n) for n in LENGTHS]


@cache
def everything(**others: Any) -> Decoder:
    """Two layers: with a window, its own RoPE and experts, and with full attention, no RoPE and an MLP."""
    config = replace(decoder(windows=(WINDOW, None)).config, **FACTS, **others)
    noise = np.random.default_rng(0)  # or norms would be ones, and 1 + 0
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + 0.3 * noise.normal(size=x.shape).astype(x.dtype)),
        Decoder(config, nnx.Rngs(0)),
    )


def assert_full_within_budget(params: Decoder, policy: kvjax.Policy) -> kvjax.KVCache:
    """Texts within the budget have the logits of full attention, beside one that is compressed to it.

    Returns the cache behind the answers.
    """
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert answer.log_probs is not None
    assert np.isfinite(answer.log_probs).all()
    if policy.limited(0):
        most = 24 if policy.every else 24 + NEW
        assert np.mean([len(positions) for heads in held(answer.cache, 2) for positions in heads]) <= most
    if policy.positions == "original":
        texts = [np.concatenate(pair) for pair in zip(ROWS[:2], answer.tokens[:2], strict=True)]
        lengths: Any = np.array(LENGTHS)
        room = np.minimum(*[np.asarray(policy.capacity(layer, lengths, 2)) for layer in (0, 1)])
        for b, logits in enumerate(full_logits(params, texts, 24)):
            if room[b] < LENGTHS[b] + (NEW if policy.every else 0):
                assert b == 1
                assert "Pyramid" in repr(policy.budget)  # whose last layer has room for the first text alone
                continue
            new = jax.nn.log_softmax(jnp.asarray(logits[LENGTHS[b] - 1 : LENGTHS[b] + NEW - 1]))
            expected = np.asarray(new)[np.arange(NEW), answer.tokens[b]]
            np.testing.assert_allclose(answer.log_probs[b], expected, atol=1e-4)
    return answer.cache
