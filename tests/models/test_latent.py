"""Attention over latents: against keys and values of every head, under every policy, in cuts over devices.

That a cache holds a latent once is tested in `test_latents_once.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Latent, Rope, SigmoidRouting, rotate
from kvjax.models.decoder import Layer
from tests.tiny import LATENT, VOCAB, full_logits, held, latents

LENGTHS, NEW = (12, 20, 60), 4
ROWS = [np.random.default_rng(n).integers(0, VOCAB, n) for n in LENGTHS]


def by_head(layer: Layer, latent: Latent, x: jax.Array) -> jax.Array:
    """What attention adds to hidden states, from keys and values of each head (equations 1 to 11 of the paper)."""
    attention: Any = layer.attention
    C, N = latent.rotated, x.shape[1]
    positions = jnp.arange(N)[None]
    frequencies = Rope(1e4).frequencies(C)
    source = x if latent.query_rank is None else attention.query_norm(x @ attention.query_down[...])
    compressed = attention.norm(x @ attention.down[...])

    def heads(weight: nnx.Param, source: jax.Array) -> jax.Array:
        return jnp.einsum("BNQ,QHD->BHND", source, weight[...])

    shared = rotate((x @ attention.key_rotated[...])[:, None], positions, frequencies)
    keys = heads(attention.key, compressed)
    keys = jnp.concatenate([keys, jnp.broadcast_to(shared, (*keys.shape[:3], C))], axis=-1)
    rotated = rotate(heads(attention.query_rotated, source), positions, frequencies)
    queries = jnp.concatenate([heads(attention.query, source), rotated], axis=-1)
    logits = jnp.einsum("BHND,BHMD->BHNM", queries, keys) * keys.shape[-1] ** -0.5 * latent.growth**2
    probabilities = jax.nn.softmax(jnp.where(jnp.tri(N, dtype=bool), logits, -jnp.inf))
    contexts = jnp.einsum("BHNM,BHMD->BHND", probabilities, heads(attention.value, compressed))
    return jnp.einsum("BHND,HDE->BNE", contexts, attention.output[...])


@pytest.mark.long(first=1)
@pytest.mark.parametrize("latent", [LATENT, replace(LATENT, query_rank=None, growth=1.3)], ids=["query rank", "growth"])
def test_it_is_attention_over_keys_and_values_of_each_head(latent):
    params, (tokens,) = latents(latent), [ROWS[1]]
    x = params.embed[...][tokens][None]
    for layer in params.layers:
        added = by_head(layer, latent, layer.attention_norm(x))
        x = layer.after_attention(x, added, kvjax.models.densely)
    np.testing.assert_allclose(full_logits(params, [tokens], 20)[0], params.logits(x)[0], atol=2e-5)


def test_output_maps_a_value_in_the_cache_to_hidden_states():
    attention = latents().layers[0].attention
    value = np.random.default_rng(1).normal(size=(1, 8, 3, LATENT.key_dim)).astype(np.float32)
    mapped = jnp.einsum("BHND,HDE->BNE", value, attention.weights["output"])
    np.testing.assert_allclose(attention.project_out(jnp.asarray(value)), mapped, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow(first=2)
def test_policies_over_latents(policy):
    """A text within the budget has the logits of full attention, beside ones that are compressed to it."""
    params = latents()
    if getattr(policy.budget, "groups", None) == 2:
        with pytest.raises(ValueError, match="groups=2 of 1 kv heads: expected a divisor of 1"):
            kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW)
        return
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW, log_probs=True)
    assert np.isfinite(answer.log_probs).all()
    if policy.limited(0):
        most = 24 if policy.every else 24 + NEW
        assert np.mean([len(positions) for heads in held(answer.cache, 2) for positions in heads]) <= most
    if policy.positions == "original" and min(policy.capacity(i, np.array(LENGTHS), 2)[0] for i in (0, 1)) >= 16:
        text = np.concatenate([ROWS[0], answer.tokens[0]])
        logits = full_logits(params, [text], 24)[0][LENGTHS[0] - 1 : LENGTHS[0] + NEW - 1]
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(NEW), answer.tokens[0]]
        np.testing.assert_allclose(answer.log_probs[0], expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "text",
    [
        "morphkv:budget=24,window=4",
        "full",
        "snapkv:budget=24,window=4",
        "adakv:base=h2o,base.budget=24",
    ],
)
def test_all_devices_hold_the_key_and_some_query_heads(text):
    params = latents()
    sharded = kvjax.shard(params, kvjax.make_mesh(data=2, model=4))
    alone, cut = (
        kvjax.generate(x, ROWS[:2], policy=text, max_new_tokens=NEW, log_probs=True) for x in (params, sharded)
    )
    np.testing.assert_array_equal(alone.tokens, cut.tokens)
    np.testing.assert_allclose(alone.log_probs, cut.log_probs, atol=1e-4)


def routed_one_by_one(logits: np.ndarray, bias: np.ndarray, routing: SigmoidRouting, k: int) -> dict[int, float]:
    """The shares of the experts that one token takes, by expert (equations 12 to 16 of arXiv 2412.19437)."""
    scores = 1 / (1 + np.exp(-logits))
    judged = scores + bias
    members = np.split(np.arange(len(logits)), routing.groups)
    best = sorted(members, key=lambda group: -sum(sorted(judged[group])[-2:]))[: routing.groups_per_token]
    chosen = sorted(np.concatenate(best), key=lambda expert: -judged[expert])[:k]
    return {int(expert): routing.scale * scores[expert] / sum(scores[chosen]) for expert in chosen}


@pytest.mark.parametrize("routing", [SigmoidRouting(4, 2, 2.5), SigmoidRouting(1, 1, 0.5), SigmoidRouting(3, 3)])
def test_routing_by_sigmoids(routing):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(50, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    chosen, shares = routing(jnp.asarray(logits), 3, True, jnp.asarray(bias))
    for i, row in enumerate(logits):
        expected = routed_one_by_one(row, bias, routing, 3)
        assert chosen[i].tolist() == list(expected)
        np.testing.assert_allclose(shares[i], list(expected.values()), rtol=1e-5)
    _, raw = routing(jnp.asarray(logits), 3, False, jnp.asarray(bias))
    np.testing.assert_allclose(shares, routing.scale * raw / np.sum(raw, axis=-1, keepdims=True), rtol=1e-5)
