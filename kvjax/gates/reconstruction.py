"""Training networks to predict KVzip's scores from hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend.causal import causal
from kvjax.files.texts import Stream
from kvjax.generate import prefill
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, Decoder
from kvjax.policies import kvzip
from kvjax.reading.replays import replayed
from kvjax.request.request import texts_of

from .forms import FORMS
from .objective import Objective, Recipe, Weights

CHANNELS = KEYS = 16  # of Fast KVzip's gates
FLOOR = 1e-6  # smaller scores of KVzip count as this one, or their logarithms would dominate the loss

# Hidden states, and KVzip's scores: NaN where a layer with a sliding window has no entry any more.
Batch = tuple[Float[Array, "L B N E"], Float[Array, "L B H N"]]


def log_scores(params: Decoder, recipe: Recipe, stream: Stream, tokenizer: Any, inner: int | None) -> Objective:
    """KVzap's objective (arXiv 2601.07891): the mean squared error of the logarithm of KVzip's scores.

    The bias of the output starts at the mean of the first batch. The paper predicts a normalised variant of KVzip's
    scores; these are the scores of the preset `kvzip`.

    Args:
        inner: the width of the hidden layer; None for a linear network.
    """
    config = params.config
    sizes = {"input_dim": config.hidden_size, "output_dim": config.num_kv_heads, "hidden_dim": inner}
    batch = partial(drawn, params, recipe, stream, tokenizer)

    def initial() -> Weights:
        means = jnp.nanmean(_logarithm(batch(0)[1]), axis=(1, 3))
        last = "bias" if inner is None else "2.bias"
        drawn_weights = random_weights("kvzap", sizes, config.num_layers, recipe.seed)
        return tuple({**layer, last: mean} for layer, mean in zip(drawn_weights, means, strict=True))

    def loss(weights: Weights, params: Decoder, batch: Batch) -> Float[Array, ""]:
        wanted, there = _present(batch[1])
        return jnp.mean(jnp.square(predicted("kvzap", weights, batch[0]) - _logarithm(wanted)), where=there)

    return Objective("kvzap", sizes, initial, batch, loss)


def cross_entropy(params: Decoder, recipe: Recipe, stream: Stream, tokenizer: Any) -> Objective:
    """Fast KVzip's objective (arXiv 2601.17668): the binary cross-entropy between gates and KVzip's scores.

    The sizes are those of the released gates: 16 channels and 16 learned keys. The loss was not compared with the
    authors' training code.
    """
    config = params.config
    sizes = {
        "input_dim": config.hidden_size,
        "nhead": config.num_kv_heads,
        "ngroup": config.num_heads // config.num_kv_heads,
        "output_dim": CHANNELS,
        "sink": KEYS,
    }

    def initial() -> Weights:
        drawn_weights = random_weights("fastkvzip", sizes, config.num_layers, recipe.seed)
        ones = {name: jnp.ones(CHANNELS) for name in ("q_norm.weight", "k_norm.weight")}
        return tuple({**layer, **ones, "b": jnp.zeros_like(layer["b"])} for layer in drawn_weights)

    def loss(weights: Weights, params: Decoder, batch: Batch) -> Float[Array, ""]:
        found = jnp.clip(predicted("fastkvzip", weights, batch[0]), FLOOR, 1 - FLOOR)
        wanted, there = _present(batch[1])
        return -jnp.mean(wanted * jnp.log(found) + (1 - wanted) * jnp.log1p(-found), where=there)

    return Objective("fastkvzip", sizes, initial, partial(drawn, params, recipe, stream, tokenizer), loss)


def _present(scores: Float[Array, "..."]) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    """Scores without NaN, in whose place gradients would be NaN too, and which of them are scores."""
    there = ~jnp.isnan(scores)
    return jnp.where(there, scores, 0), there


def _logarithm(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.log(jnp.maximum(scores, FLOOR))


def predicted(method: str, weights: Weights, hidden: Float[Array, "L B N E"]) -> Float[Array, "L B H N"]:
    """Returns the scores that the networks of all layers give to hidden states."""
    score = FORMS[method].score
    assert score is not None
    return jnp.stack([score(layer, x) for layer, x in zip(weights, hidden, strict=True)])


def random_weights(method: str, sizes: Mapping[str, int | None], layers: int, seed: int) -> Weights:
    """Normal weights of variance 1 / (number of inputs), and zero biases."""
    rng = np.random.default_rng(seed)

    def drawn_tensor(shape: tuple[int, ...]) -> Float[Array, "..."]:
        value = rng.normal(size=shape) * shape[-1] ** -0.5 if len(shape) > 1 else np.zeros(shape)
        return jnp.asarray(value, jnp.float32)

    each = [FORMS[method].shapes_of(i, sizes) for i in range(layers)]
    return tuple({name: drawn_tensor(shape) for name, shape in shapes.items()} for shapes in each)


def silent(method: str, params: Decoder, sizes: Mapping[str, int | None], seed: int) -> Weights:
    """Draws learned tokens, which are embeddings of random tokens, and adapters without an effect."""
    config = params.config
    layers = random_weights(method, sizes, config.num_layers, seed)
    first, *others = ({name: x * ("lora_B" not in name) for name, x in layer.items()} for layer in layers)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, sizes["tokens"])
    own = params.embed[...][ids].astype(jnp.float32) * config.embedding_scale
    return ({**first, "tokens": own}, *others)


def drawn(params: Decoder, recipe: Recipe, stream: Stream, tokenizer: Any, step: int) -> Batch:
    """The batch of a step: hidden states and KVzip's scores of windows of the stream."""
    tokens = stream.windows(recipe.batch, recipe.length, np.random.default_rng([recipe.seed, step]))
    return hidden_states(params, jnp.asarray(tokens)), kvzip_scores(params, tokens, tokenizer)


@jax.jit
def hidden_states(params: Decoder, tokens: Int[Array, "B N"]) -> Float[Array, "L B N E"]:
    """Returns the hidden states that attention reads in each layer, in the model's dtype, of texts without padding."""
    seen: list[Any] = []
    attend = causal(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))

    def look(layer: AttentionLayer, *args: Any) -> tuple[Array, Any]:
        seen.append(layer.hidden)
        return attend(layer, *args)

    params(tokens, look)
    return jnp.stack(seen)


def kvzip_scores(params: Decoder, tokens: Int[np.ndarray, "B N"], tokenizer: Any) -> Float[Array, "L B H N"]:
    """KVzip's scores of each token, in order of position; NaN where a layer's window has left the token behind."""
    policy = kvzip(1.0)
    cache = prefill(params, tokens, policy=policy, tokenizer=tokenizer, compress="never")
    texts = texts_of(policy, tokenizer, params.config.vocab_size)
    lengths = np.full(len(tokens), tokens.shape[1], np.int32)
    return _by_position(
        replayed(params, cache, cache.put_rows(tokens), cache.put_rows(lengths), texts), tokens.shape[1]
    )


@partial(jax.jit, static_argnames="length")
def _by_position(cache: KVCache, length: int) -> Float[Array, "L B H N"]:
    found = []
    for layer in cache.entries:
        blank = jnp.full((*layer.per_slot.shape[:2], length), jnp.nan, layer.per_slot.dtype)
        places = jnp.where(layer.positions < 0, length, layer.positions)  # those of empty slots are dropped
        found.append(jnp.put_along_axis(blank, places, layer.per_slot, axis=-1, inplace=False, mode="drop"))
    return jnp.stack(found)
