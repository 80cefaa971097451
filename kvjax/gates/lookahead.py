"""Training LookaheadKV's tokens and adapters, whose attention shall be that of the answer (arXiv 2603.10899)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend.causal import causal
from kvjax.files.texts import Stream
from kvjax.models import Attend, AttentionLayer, Decoder

from .adapters import adapted, adapter_sizes
from .answers import answered
from .attending import behind, turned, weights
from .objective import Objective, Recipe, Weights
from .reconstruction import silent

LEAST = 1e-9  # smaller importances count as this one, so that logarithms are finite

Batch = tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]  # prompts with their answers, and the answers' lengths


def divergence(
    params: Decoder,
    recipe: Recipe,
    stream: Stream,
    tokenizer: Any,
    tokens: int = 32,
    rank: int = 8,
    answer: int = 32,
) -> Objective:
    """LookaheadKV's objective: the divergence of the importance by learned tokens from that by the answer.

    A prompt is a window of the stream that ends where a text ends, and the model answers it greedily. The importance t
    of an entry of the prompt is its mean attention from the tokens of the answer, and s that from the learned tokens;
    both are divided by their sum over the prompt:

        loss = mean over layers, query heads and prompts of sum over c of t_c log (t_c / s_c)

    The learned tokens begin as embeddings of random tokens, and the adapters without an effect. The loss was not
    compared with the authors' training code.

    Args:
        params: the model.
        recipe: the settings that all methods have; `length` is that of the prompts.
        stream: the texts.
        tokenizer: is not used.
        tokens: the number of learned tokens.
        rank: of the adapters.
        answer: the number of tokens of an answer.

    Raises:
        ValueError: the model has latent attention.
    """
    config, length = params.config, recipe.length
    sizes = {**adapter_sizes(config), "rank": rank, "tokens": tokens}

    def initial() -> Weights:
        return silent("lookaheadkv", params, sizes, recipe.seed)

    def batch(step: int) -> Batch:
        prompts = stream.endings(recipe.batch, length, np.random.default_rng([recipe.seed, step]))
        return answered(params, prompts, answer)

    def loss(gates: Weights, params: Decoder, batch: Batch) -> Float[Array, ""]:
        text, counts = map(jnp.asarray, batch)
        real = jnp.arange(answer) < counts[:, None]
        positions = jnp.broadcast_to(jnp.arange(length + answer), text.shape)
        ahead = jnp.broadcast_to(length + jnp.arange(tokens), (len(text), tokens))
        x, _ = params.embedding(text)
        z = jnp.broadcast_to(gates[0]["tokens"].astype(x.dtype), (len(text), tokens, config.hidden_size))
        divergences = []
        for layer, record, own in zip(params.layers, params.attention_layers, gates, strict=True):
            prompt, states = layer.recur(x[:, :length])
            answers, _ = layer.recur(x[:, length:], states=states)
            seen: list[Any] = []
            attend = _answering(positions, real, seen)
            x, _ = layer(jnp.concatenate([prompt, answers], axis=1), record, attend, None)
            keys, values, wanted = seen
            z, _ = layer.recur(z, states=states)
            z, (found, *_) = adapted(layer, own)(z, record, behind(ahead, keys, values, positions[:, :length]), None)
            found = _importance(found[..., :length])
            divergences.append(jnp.mean(jnp.sum(wanted * jnp.log(wanted / found), axis=-1)))
        return jnp.mean(jnp.stack(divergences))

    return Objective("lookaheadkv", sizes, initial, batch, loss, settings={"answer": answer})


def _answering(positions: Int[Array, "B T"], real: Bool[Array, "B A"], seen: list[Any]) -> Attend:
    """Causal attention that notes the keys and values of the prompt, and its importance by the answer [B, Hq, N].

    Of an answer that ends early, the tokens that are `real` count.
    """
    plain, length = causal(positions), positions.shape[1] - real.shape[1]

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq T D"],
        k: Float[Array, "B H T D"],
        v: Float[Array, "B H T D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq T D"], Any]:
        keys = turned(layer, k, positions)
        queries = turned(layer, layer.rope.grown(q, positions)[:, :, length:], positions[:, length:])
        found = weights(layer, queries, keys, positions[:, length:], positions)
        seen.extend((keys[:, :, :length], v[:, :, :length], _importance(found[..., :length] * real[:, None, :, None])))
        return plain(layer, q, k, v, cache)

    return attend


def _importance(weights: Float[Array, "B Hq W N"]) -> Float[Array, "B Hq N"]:
    """The weight of each entry from all queries as a share of that of all entries, at least `LEAST`."""
    received = jnp.sum(weights, axis=2)
    return jnp.maximum(received / jnp.maximum(jnp.sum(received, axis=-1, keepdims=True), LEAST), LEAST)
