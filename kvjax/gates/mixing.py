"""Training DuoAttention's gates, which say how much answers need each kv head (arXiv 2410.10819, section 2.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend.causal import causal
from kvjax.files.texts import Stream
from kvjax.models import Attend, AttentionLayer, Decoder, join_sinks
from kvjax.pallas_kernels import capped

from .attending import turned
from .objective import Objective, Recipe, Weights
from .passkeys import KEYS, PassKeys, wording_of

REGULARISATION = 0.05

Batch = tuple[Int[np.ndarray, "B N"], Bool[np.ndarray, "B N"]]  # tokens, and which of them recite pass keys


def distillation(
    params: Decoder, recipe: Recipe, stream: Stream, tokenizer: Any, sinks: int = 128, recent: int = 256
) -> Objective:
    """DuoAttention's objective: the mixed attention of `mixed` shall change little while most gates are small.

    With h the normed last hidden states of the model, h' those under mixed attention, and A the tokens of a text that
    precede a token of the answers:

        loss = mean over A and channels of (h' - h)^2 + 0.05 * mean of the gates

    Gates begin at 1, and each step clips them to [0, 1]. A text is a window of the stream with ten pass keys at random
    places, and their recital.

    Args:
        params: the model.
        recipe: the settings that all methods have.
        stream: the texts.
        tokenizer: encodes the pass keys.
        sinks: the number of first tokens that streaming attention sees.
        recent: the number of most recent tokens that it sees, among which a query counts itself.

    Raises:
        ValueError: the tokenizer cannot write the pass keys, or the texts are too short for them or for a streaming
            head to miss any token.
    """
    config, length, wording = params.config, recipe.length, wording_of(tokenizer)
    if length <= sinks + recent:
        raise ValueError(
            f"length={length} with sinks={sinks} and recent={recent}: expected more tokens than sinks + recent, which "
            "streaming heads see"
        )

    def batch(step: int) -> Batch:
        rng = np.random.default_rng([recipe.seed, step])
        texts = [PassKeys.drawn(wording, tokenizer, rng).woven(stream, length, rng) for _ in range(recipe.batch)]
        tokens, recited = (np.stack(column) for column in zip(*texts, strict=True))
        return tokens, recited

    least = 2 * PassKeys.drawn(wording, tokenizer, np.random.default_rng(recipe.seed)).size
    if length < least:  # twice: other pass keys may have a few tokens more
        raise ValueError(
            f"length={length}: expected {least} or more, twice the tokens of {KEYS} pass keys and their recital"
        )

    def initial() -> Weights:
        return tuple({"gates": jnp.ones(config.num_kv_heads)} for _ in range(config.num_layers))

    def loss(weights: Weights, params: Decoder, batch: Batch) -> Float[Array, ""]:
        tokens, recited = map(jnp.asarray, batch)
        gates = jnp.stack([layer["gates"] for layer in weights])
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

        def states(attend: Attend) -> Float[Array, "B N E"]:
            return params.norm(params(tokens, attend)[0]).astype(jnp.float32)

        difference = states(mixed(gates, positions, sinks, recent)) - states(causal(positions))
        foretells = jnp.roll(recited, -1, axis=1)  # a text does not begin with an answer
        apart = jnp.mean(jnp.square(difference), axis=-1)
        return jnp.sum(apart * foretells) / jnp.sum(foretells) + REGULARISATION * jnp.mean(gates)

    return Objective(
        "duo_attention",
        {"output_dim": config.num_kv_heads},
        initial,
        batch,
        loss,
        bounded=lambda weights: jax.tree.map(lambda gates: jnp.clip(gates, 0.0, 1.0), weights),
        settings={"sinks": sinks, "recent": recent},
    )


def mixed(gates: Float[Array, "L H"], positions: Int[Array, "B N"], sinks: int, recent: int) -> Attend:
    """Attention that mixes two of them in each kv head: gate * full + (1 - gate) * streaming attention.

    In streaming attention a query sees the first `sinks` tokens and the `recent` last ones, itself included. Sequences
    have no padding. Gradients recompute the weights of each layer instead of storing them.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        @jax.checkpoint
        def context(q: Array, k: Array, v: Array, gate: Float[Array, "H"]) -> Float[Array, "B Hq N D"]:
            B, Hq, N, D = q.shape
            q, k = (turned(layer, x, positions) for x in (layer.rope.grown(q, positions), k))
            grouped = q.reshape(B, k.shape[1], -1, N, D)
            logits = jnp.einsum("BHGND,BHSD->BHGNS", grouped, k, preferred_element_type=jnp.float32)
            logits = capped(logits * layer.scale, layer.softcap)
            at = jnp.arange(N)
            distance = at[:, None] - at
            full = (distance >= 0) & (distance < (layer.window or N))
            streaming = full & ((at < sinks) | (distance < recent))

            def seeing(visible: Bool[Array, "N N"]) -> Float[Array, "B H G N D"]:
                own = jnp.where(visible, logits, -jnp.inf)
                weights = jax.nn.softmax(own, axis=-1).astype(v.dtype)
                found = jnp.einsum("BHGNS,BHSD->BHGND", weights, v).reshape(B, Hq, N, D)
                lse = jax.nn.logsumexp(own, axis=-1).reshape(B, Hq, N)
                return join_sinks(found, lse, layer.sinks)[0].reshape(grouped.shape)

            share = gate[:, None, None, None]
            return (share * seeing(full) + (1 - share) * seeing(streaming)).astype(v.dtype).reshape(B, Hq, N, D)

        return context(q, k, v, gates[layer.index]), cache

    return attend
