"""Training RestoreKV's tokens and adapters: answers from a compressed cache shall be those of the complete one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import policies
from kvjax.attend.causal import causal
from kvjax.files.texts import Stream
from kvjax.generate import prefill
from kvjax.models import Attend, AttentionLayer, Decoder
from kvjax.policy.suits import check_suits

from .adapters import adapted, adapter_sizes
from .answers import answered
from .attach import with_gates
from .attending import behind, turned
from .files import Gates
from .objective import Objective, Recipe, Weights
from .reconstruction import silent

# Texts with their answers, the answers' lengths, and the entries of the context that the base retains.
Batch = tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"], Bool[np.ndarray, "B L H C"]]


def restoration(
    params: Decoder,
    recipe: Recipe,
    stream: Stream,
    tokenizer: Any,
    tokens: int = 8,
    rank: int = 8,
    question: int = 16,
    answer: int = 32,
    base: str = "kvzip:budget=0.1",
) -> Objective:
    """RestoreKV's objective: the divergence of answers from a compressed cache from those of the complete one.

    A text is a window of the stream that ends where a text ends. Its last tokens are the question, and those before
    them the context, which is compressed. The model answers the text greedily from the complete cache. With p the
    distribution of the next token there, and q that after the question has been read behind the compressed cache and
    the entries of the learned tokens:

        loss = mean over the tokens of answers of sum over v of p_v log (p_v / q_v)

    The gradient reaches tokens and adapters through the attention on their entries; what the base retains is fixed. The
    learned tokens begin as embeddings of random tokens, and the adapters without an effect.

    Args:
        params: the model.
        recipe: the settings that all methods have; `length` is that of the texts.
        stream: the texts.
        tokenizer: encodes the texts that the base replays.
        tokens: the number of learned tokens.
        rank: of the adapters.
        question: the number of last tokens of a text that are read behind the compressed cache.
        answer: the number of tokens of an answer.
        base: the policy that compresses contexts, as text.

    Raises:
        ValueError: the model has latent attention; the base is no base of `restorekv`, merges entries or retains every
            entry of a context; or no context is left of a text.
    """
    config, length = params.config, recipe.length
    context = length - question
    if context < 1:
        raise ValueError(f"question={question} with length={length}: expected fewer tokens than a text has")
    sizes = {**adapter_sizes(config), "rank": rank, "tokens": tokens}
    policy = policies.restorekv(policies.parse(base), tokens)
    check_suits(policy, config, 1)
    layers, lengths = range(config.num_layers), jnp.array([context])
    if policy.merge.effects.merges:
        raise ValueError(f"base={base} merges entries, which training does not: expected a policy that drops them")
    if all(int(policy.capacity(i, lengths, len(layers))[0]) >= context for i in layers):
        raise ValueError(f"base={base} retains every entry of {context} tokens: expected a smaller budget")

    def initial() -> Weights:
        return silent("restorekv", params, sizes, recipe.seed)

    attached = with_gates(params, Gates("restorekv", sizes, jax.tree.map(np.asarray, initial())))

    def batch(step: int) -> Batch:
        texts = stream.endings(recipe.batch, length, np.random.default_rng([recipe.seed, step]))
        compressed = prefill(attached, texts[:, :context], policy=policy, tokenizer=tokenizer)
        return *answered(params, texts, answer), compressed.retained_mask()[..., :context]

    def loss(gates: Weights, params: Decoder, batch: Batch) -> Float[Array, ""]:
        text, counts, retained = map(jnp.asarray, batch)
        real = jnp.arange(answer) < counts[:, None]

        def rows(positions: Int[Array, "W"]) -> Int[Array, "B W"]:
            return jnp.broadcast_to(positions, (len(text), len(positions)))

        of, at, ahead = (rows(jnp.arange(n)) for n in (context, text.shape[1] - context, tokens))
        whole, ahead, at = rows(jnp.arange(text.shape[1])), ahead + context, at + context + tokens
        x, _ = params.embedding(text)
        own = x[:, context:]
        z = jnp.broadcast_to(gates[0]["tokens"].astype(x.dtype), (len(text), tokens, config.hidden_size))
        for i, (layer, record, adapters) in enumerate(zip(params.layers, params.attention_layers, gates, strict=True)):
            before, states = layer.recur(x[:, :context])
            after, _ = layer.recur(x[:, context:], states=states)
            own, _ = layer.recur(own, states=states)
            z, _ = layer.recur(z, states=states)
            entries: list[Any] = []
            x, _ = layer(jnp.concatenate([before, after], axis=1), record, _noting(whole, context, entries), None)
            keys, values = entries
            z, (_, *learned) = adapted(layer, adapters)(z, record, behind(ahead, keys, values, of), None)
            keys, values = (jnp.concatenate(pair, axis=2) for pair in zip((keys, values), learned, strict=True))
            held = retained[:, i, : keys.shape[1]]
            held = jnp.concatenate([held, jnp.ones((*held.shape[:2], tokens), bool)], axis=2)
            own, _ = layer(own, record, behind(at, keys, values, jnp.concatenate([of, ahead], axis=1), held), None)
        full = jax.nn.log_softmax(params.logits(x[:, length - 1 : -1]))
        found = jax.nn.log_softmax(params.logits(own[:, question - 1 : -1]))
        divergence = jnp.sum(jnp.exp(full) * (full - found), axis=-1)
        return jnp.sum(divergence * real) / jnp.sum(real)

    settings = {"question": question, "answer": answer, "base": base}
    return Objective("restorekv", sizes, initial, batch, loss, settings=settings)


def _noting(positions: Int[Array, "B T"], count: int, entries: list[Any]) -> Attend:
    """Causal attention that notes the rotated keys and the values of the first `count` tokens."""
    plain = causal(positions)

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq T D"],
        k: Float[Array, "B H T D"],
        v: Float[Array, "B H T D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq T D"], Any]:
        entries.extend((turned(layer, k, positions)[:, :, :count], v[:, :, :count]))
        return plain(layer, q, k, v, cache)

    return attend
