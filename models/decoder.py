"""The decoder of all families: layers of rotary grouped-query attention and a gated MLP, with norms and residuals.

Attention is an argument. A layer computes q, k and v, passes them to `attend` *before rotation* together with the
opaque cache, and projects the result. The caller of the decoder defines what the cache is and which tokens a query
sees; this module knows no cache and no policy. How experts are computed is an argument, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .attend import Attend, AttentionLayer
from .card import Card
from .config import DecoderConfig
from .head import Head
from .linear import bias, linear, weight
from .mixture import ExpertWeights, Mix, densely
from .norm import RMSNorm, maybe

BLOCK = 8192  # the largest number of tokens, over all rows, in a block of `by_blocks`


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Attention(nnx.Module):
    """The projections to query, key and value heads and back, without attention itself.

    Some families have biases, or norms on the query and key heads. `gates` holds networks by name that read the same
    hidden states, such as those of `kvjax.with_gates`, and `statistics` what was measured of the queries, such as that
    of `kvjax.with_statistics`. A checkpoint of the model has neither.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        E, Hq, H, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.query = weight(rngs, (E, Hq, D), ("embed", "heads", "head_dim"), E, dtype)
        self.key = weight(rngs, (E, H, D), ("embed", "kv_heads", "head_dim"), E, dtype)
        self.value = weight(rngs, (E, H, D), ("embed", "kv_heads", "head_dim"), E, dtype)
        self.output = weight(rngs, (Hq, D, E), ("heads", "head_dim", "embed"), Hq * D, dtype)
        self.query_bias = bias(config.qkv_bias, (Hq, D), ("heads", "head_dim"), dtype)
        self.key_bias = bias(config.qkv_bias, (H, D), ("kv_heads", "head_dim"), dtype)
        self.value_bias = bias(config.qkv_bias, (H, D), ("kv_heads", "head_dim"), dtype)
        self.output_bias = bias(config.output_bias, (E,), ("embed",), dtype)
        self.sinks = bias(config.attention_sinks, (Hq,), ("heads",), dtype)
        self.joint_norm = config.joint_qk_norm
        norms: list[RMSNorm | None] = [None, None]
        if config.qk_norm:
            leading = ((Hq, "heads"), (H, "kv_heads")) if config.joint_qk_norm else ((), ())
            norms = [RMSNorm(config, (*x[:1], D), (*x[1:], "head_dim"), dtype) for x in leading]
        self.query_norm, self.key_norm = norms
        self.gates: nnx.Dict[Any] = nnx.Dict()
        self.statistics: nnx.Dict[Any] = nnx.Dict()

    def __call__(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        projections = (self.query, self.query_bias), (self.key, self.key_bias), (self.value, self.value_bias)
        products = _apart([linear(x, weight[...].reshape(x.shape[-1], -1), bias) for weight, bias in projections])
        norms = self.query_norm, self.key_norm, None
        if self.joint_norm:
            products = [maybe(norm, y) for norm, y in zip(norms, products, strict=True)]
        heads = [_heads_first(y, self.query.shape[-1]) for y in products]
        if not self.joint_norm:
            heads = [maybe(norm, y) for norm, y in zip(norms, heads, strict=True)]
        q, k, v = heads
        return attend(replace(layer, hidden=x, gates=self.gates), q, k, v, cache)

    @property
    def weights(self) -> dict[str, Any]:
        """The weights that an `AttentionLayer` has."""
        return {
            "output": self.output[...],
            "sinks": None if self.sinks is None else self.sinks[...],
            "statistics": {name: statistic[...] for name, statistic in self.statistics.items()},
        }

    def project_out(self, context: Float[Array, "B Hq N D"]) -> Float[Array, "B N E"]:
        """Projects the contexts of all heads back to hidden states."""
        B, Hq, N, D = context.shape
        flat = jnp.swapaxes(context, 1, 2).reshape(B, N, Hq * D)
        return linear(flat, self.output[...].reshape(Hq * D, -1), self.output_bias)


def _apart(products: list[Float[Array, "B N O"]]) -> list[Float[Array, "B N O"]]:
    """Keeps matrix products apart from the transposes that follow.

    Without the barrier XLA transposes the weights instead of the activations. A single token is not transposed on a
    GPU, where the barrier would add a kernel.
    """

    def apart(products: list[Array]) -> list[Array]:
        return [jax.lax.optimization_barrier(product) for product in products]

    if products[0].shape[1] > 1:
        return apart(products)
    return jax.lax.platform_dependent(products, cuda=lambda products: products, default=apart)


def _heads_first(x: Float[Array, "B N O"], head_dim: int) -> Float[Array, "B H N D"]:
    """Splits the last axis into heads and puts them before the tokens."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, head_dim), 1, 2)


class MLP(nnx.Module):
    """The gated MLP, SwiGLU or GeGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        E, F = config.hidden_size, config.mlp_size
        self.activation = config.activation
        self.gate = weight(rngs, (E, F), ("embed", "mlp"), E, dtype)
        self.up = weight(rngs, (E, F), ("embed", "mlp"), E, dtype)
        self.down = weight(rngs, (F, E), ("mlp", "embed"), F, dtype)
        self.gate_bias = bias(config.mlp_bias, (F,), ("mlp",), dtype)
        self.up_bias = bias(config.mlp_bias, (F,), ("mlp",), dtype)
        self.down_bias = bias(config.mlp_bias, (E,), ("embed",), dtype)

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        gate, up = linear(x, self.gate[...], self.gate_bias), linear(x, self.up[...], self.up_bias)
        return linear(ACTIVATIONS[self.activation](gate) * up, self.down[...], self.down_bias)


class Experts(nnx.Module):
    """The experts of a layer, each a gated MLP, and the router that chooses among them (arXiv 1701.06538)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.mixture is not None
        X, E, F = config.mixture.experts, config.hidden_size, config.mixture.size
        self.mixture, self.activation = config.mixture, config.activation
        self.router = weight(rngs, (E, X), ("embed", "choices"), E, dtype)
        self.gate = weight(rngs, (X, E, F), ("experts", "embed", "expert_mlp"), E, dtype)
        self.up = weight(rngs, (X, E, F), ("experts", "embed", "expert_mlp"), E, dtype)
        self.down = weight(rngs, (X, F, E), ("experts", "expert_mlp", "embed"), F, dtype)
        biased = config.mixture.biased
        self.router_bias = bias(biased, (X,), ("choices",), dtype)
        self.gate_bias = bias(biased, (X, F), ("experts", "expert_mlp"), dtype)
        self.up_bias = bias(biased, (X, F), ("experts", "expert_mlp"), dtype)
        self.down_bias = bias(biased, (X, E), ("experts", "embed"), dtype)

    def __call__(self, x: Float[Array, "B N E"], mix: Mix) -> Float[Array, "B N E"]:
        biases = self.router_bias, self.gate_bias, self.up_bias, self.down_bias
        weights = ExpertWeights(
            *(matrix[...] for matrix in (self.router, self.gate, self.up, self.down)),
            *(None if vector is None else vector[...] for vector in biases),
        )
        return mix(x, weights, self.mixture, ACTIVATIONS[self.activation])


class Layer(nnx.Module):
    """One decoder layer: attention and MLP, each with RMS norms before or after it, and a residual connection."""

    def __init__(self, config: DecoderConfig, index: int, rngs: nnx.Rngs, dtype: DTypeLike):
        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(config, (config.hidden_size,), ("embed",), dtype) if wanted else None

        self.residual_scale = config.residual_scale
        self.attention_norm = norm(config.pre_norm)
        self.attention = Attention(config, rngs, dtype)
        self.attention_post_norm = norm(config.post_norm)
        self.mlp_norm = norm(config.pre_norm)
        experts = config.has_experts(index)
        self.mlp = None if experts else MLP(config, rngs, dtype)
        self.experts = Experts(config, rngs, dtype) if experts else None
        self.mlp_post_norm = norm(config.post_norm)

    def __call__(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any, mix: Mix = densely
    ) -> tuple[Float[Array, "B N E"], Any]:
        context, cache = self.attended(x, layer, attend, cache)

        def update(x: Float[Array, "B n E"], context: Float[Array, "B Hq n D"]) -> Float[Array, "B n E"]:
            return self.after_attention(x, self.attention.project_out(context), mix)

        return by_blocks(update, x, context), cache

    def attended(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        """The contexts of all heads, and the layer's cache."""
        return self.attention(maybe(self.attention_norm, x), layer, attend, cache)

    def after_attention(
        self, x: Float[Array, "B n E"], attention: Float[Array, "B n E"], mix: Mix
    ) -> Float[Array, "B n E"]:
        """Returns the output of the layer, from its input and the projected contexts."""
        x = x + self.scaled(maybe(self.attention_post_norm, attention))
        return x + self.scaled(maybe(self.mlp_post_norm, self.feed_forward(maybe(self.mlp_norm, x), mix)))

    def feed_forward(self, x: Float[Array, "B n E"], mix: Mix) -> Float[Array, "B n E"]:
        """The MLP, or the mixture of experts in its place."""
        if self.experts is not None:
            return self.experts(x, mix)
        assert self.mlp is not None
        return self.mlp(x)

    def scaled(self, x: Float[Array, "B n E"]) -> Float[Array, "B n E"]:
        """Returns what is added to the hidden states. A product with a factor of 1 would be one more kernel."""
        return x if self.residual_scale == 1 else (x.astype(jnp.float32) * self.residual_scale).astype(x.dtype)


def by_blocks(
    update: Callable[[Float[Array, "B n E"], Float[Array, "B Hq n D"]], Float[Array, "B n E"]],
    x: Float[Array, "B N E"],
    context: Float[Array, "B Hq N D"],
) -> Float[Array, "B N E"]:
    """Applies `update`, which treats each token independently, to one block of tokens after another.

    The activations of the MLP are several times as large as the hidden states. With blocks, only those of one block are
    in memory. All blocks have the same size, of at most BLOCK tokens over all rows. There are at most twice as many
    blocks as BLOCK requires. If no such number divides N, `update` runs on all tokens at once.
    """
    B, N = x.shape[:2]
    least = -(-B * N // BLOCK)
    blocks = next((n for n in range(least, 2 * least + 1) if N % n == 0), 1)
    if blocks == 1:
        return update(x, context)
    size = N // blocks
    x_blocks = x.reshape(B, blocks, size, -1)
    context_blocks = context.reshape(*context.shape[:2], blocks, size, -1)

    def update_block(i: Int[Array, ""], x_blocks: Float[Array, "B blocks n E"]) -> Float[Array, "B blocks n E"]:
        x_block = jax.lax.dynamic_index_in_dim(x_blocks, i, axis=1, keepdims=False)
        context_block = jax.lax.dynamic_index_in_dim(context_blocks, i, axis=2, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(x_blocks, update(x_block, context_block), i, axis=1)

    return jax.lax.fori_loop(0, blocks, update_block, x_blocks).reshape(x.shape)


def embedded(embed: nnx.Param, tokens: Int[Array, "B N"], scale: float) -> Float[Array, "B N E"]:
    """Returns the embeddings of tokens, times `scale` in the dtype of the embeddings."""
    x = embed[...][tokens]
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


class Decoder(nnx.Module):
    """The parameters of a decoder, and the functions that run it. Public functions take it as `params`.

    `params` is a Flax `nnx.Module` and a pytree: its leaves are the weights, and its `DecoderConfig` is static data in
    `params.config`, as is what a checkpoint says beside its weights, the `Card` in `params.card`. Pass it to `jax.jit`
    like any pytree. `params(tokens, attend, cache)` runs the layers, and `params.logits(hidden)` maps hidden states to
    next-token logits.

    Args:
        config: the architecture.
        rngs: the source of the random initial weights.
        dtype: the dtype of all weights.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        V, E = config.vocab_size, config.hidden_size
        self.config, self.card = config, Card()
        self.embed = weight(rngs, (V, E), ("vocab", "embed"), E, dtype)
        self.layers = nnx.List([Layer(config, index, rngs, dtype) for index in range(config.num_layers)])
        self.norm = RMSNorm(config, (E,), ("embed",), dtype)
        self.unembed = None if config.tie_embeddings else weight(rngs, (E, V), ("embed", "vocab"), E, dtype)

    def __call__(
        self, tokens: Int[Array, "B N"], attend: Attend, cache: Any = None, mix: Mix = densely
    ) -> tuple[Float[Array, "B N E"], Any]:
        """Runs the layers, unrolled.

        Token positions are not an argument, because only rotation and masking use them, and `attend` does both.

        Args:
            tokens: token ids.
            attend: the attention function. Every layer calls it with the cache that the layer before returned.
            cache: the first layer's cache; any pytree that `attend` accepts.
            mix: computes the mixtures of layers with experts. By default every expert treats every token.

        Returns:
            The hidden states before the last norm, in the dtype of the weights, and the last layer's cache.
        """
        x = embedded(self.embed, tokens, self.config.embedding_scale)
        for layer, record in zip(self.layers, self.attention_layers, strict=True):
            x, cache = layer(x, record, attend, cache, mix)
        return x, cache

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The record of each layer that its attention function receives."""
        config = self.config
        return [
            AttentionLayer(index, config.rope_of(index), **config.logits_of(index), **layer.attention.weights)
            for index, layer in enumerate(self.layers)
        ]

    def logits(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Returns next-token logits in float32.

        The last norm is applied here, not in `__call__`, because logits are needed at few positions of a prompt.
        """
        return self.head(hidden)

    @property
    def head(self) -> Head:
        """The module that maps hidden states to logits, apart from the layers."""
        return Head(self.config, self.norm, self.embed if self.unembed is None else self.unembed)
