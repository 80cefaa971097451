"""The decoder of all families: layers of rotary attention and a gated MLP, with norms and residuals.

Attention is an argument. A layer computes q, k and v, passes them to `attend` *before rotation* together with the
opaque cache, and projects the result. The caller of the decoder defines what the cache is and which tokens a query
sees; this module knows no cache and no policy. How experts are computed is an argument, too. In a hybrid model, layers
without attention belong to the attention layer that follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..pallas_kernels import apart
from .attend import Attend, AttentionLayer, lending
from .card import Card
from .config import DecoderConfig
from .embedding import Embedding, of_layer
from .feed_forward import FeedForward, by_blocks
from .head import Head
from .latent_attention import LatentAttention
from .layer_inputs import LayerInputs, TakesInput
from .linear import bias, heads_first, linear, weight
from .mixture import Mix, densely
from .norm import RMSNorm, hidden_norm, maybe, rms_normed
from .recurrence import RecurrentState
from .recurrent import RecurrentLayer


class Attention(nnx.Module):
    """The projections to query, key and value heads and back, without attention itself.

    Some families have biases, norms on the query, key and value heads, values that are keys before norm and rotation,
    or `output_gate`, which multiplies contexts by sigmoid(x W). A layer that reads another one's entries has queries
    alone. `gates` holds networks by name that read the same hidden states, or adapt the layer, such as those of
    `kvjax.with_gates`, and `statistics` what was measured of the queries, such as that of `kvjax.with_statistics`. A
    checkpoint of the model has neither of the two.
    """

    def __init__(self, config: DecoderConfig, index: int, rngs: nnx.Rngs, dtype: DTypeLike, reads: bool = False):
        E, Hq, (H, D), keys = config.hidden_size, config.num_heads, config.heads_of(index), not reads
        values = keys and config.has_values(index)
        nothing: Any = None  # so that only the readers of a model have to know of it
        self.query = weight(rngs, (E, Hq, D), ("embed", "heads", "head_dim"), E, dtype)
        self.key = weight(rngs, (E, H, D), ("embed", "kv_heads", "head_dim"), E, dtype) if keys else nothing
        self.value = weight(rngs, (E, H, D), ("embed", "kv_heads", "head_dim"), E, dtype) if values else None
        self.output = weight(rngs, (Hq, D, E), ("heads", "head_dim", "embed"), Hq * D, dtype)
        self.query_bias = bias(config.qkv_bias, (Hq, D), ("heads", "head_dim"), dtype)
        self.key_bias = bias(config.qkv_bias and keys, (H, D), ("kv_heads", "head_dim"), dtype)
        self.value_bias = bias(config.qkv_bias and values, (H, D), ("kv_heads", "head_dim"), dtype)
        self.output_bias = bias(config.output_bias, (E,), ("embed",), dtype)
        axes = ("embed", "heads", "head_dim")
        self.output_gate = weight(rngs, (E, Hq, D), axes, E, dtype) if config.output_gate else None
        self.sinks = bias(config.attention_sinks, (Hq,), ("heads",), dtype)
        self.joint_norm, self.value_epsilon = config.joint_qk_norm, config.norm_epsilon if config.value_norm else None
        norms: list[RMSNorm | None] = [None, None]
        if config.qk_norm:
            leading = ((Hq, "heads"), (H, "kv_heads")) if config.joint_qk_norm else ((), ())
            norms = [RMSNorm(config, (*x[:1], D), (*x[1:], "head_dim"), dtype) for x in leading]
        self.query_norm, self.key_norm = norms[0], norms[1] if keys else None
        self.gates: nnx.Dict[Any] = nnx.Dict()
        self.statistics: nnx.Dict[Any] = nnx.Dict()

    def __call__(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        projections = [(self.query, self.query_bias), (self.key, self.key_bias), (self.value, self.value_bias)]
        own = [(weight[...].reshape(x.shape[-1], -1), bias) for weight, bias in projections if weight is not None]
        products = apart([linear(x, *weights) for weights in own])
        if len(products) == 2:
            products.append(products[1])
        norms = (self.query_norm, self.key_norm, None)[: len(products)]
        if self.joint_norm:
            products = [maybe(norm, y) for norm, y in zip(norms, products, strict=True)]
        heads: list[Any] = [heads_first(y, self.query.shape[-1]) for y in products]
        if not self.joint_norm:
            heads = [maybe(norm, y) for norm, y in zip(norms, heads, strict=True)]
        q, k, v = heads if len(heads) == 3 else (*heads, None, None)
        if self.value_epsilon is not None and v is not None:
            v = rms_normed(v, self.value_epsilon).astype(v.dtype)
        context, cache = attend(replace(layer, hidden=x, gates=self.gates), q, k, v, cache)
        if self.output_gate is not None:
            gate = linear(x, self.output_gate[...].reshape(x.shape[-1], -1), None)
            context = context * jax.nn.sigmoid(heads_first(gate, context.shape[-1]))
        return context, cache

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


class Layer(FeedForward):
    """One decoder layer: attention and MLP, each with RMS norms before or after it, and a residual connection.

    Recurrent layers that precede it in a hybrid model belong to it, in `before`.

    Args:
        index: of the layer, or of the one whose entries it reads.
        reads: whether it reads the entries of another layer, and has no keys and values.
    """

    def __init__(self, config: DecoderConfig, index: int, rngs: nnx.Rngs, dtype: DTypeLike, reads: bool = False):
        if config.readers is not None and reads:
            config = replace(config, mlp_size=config.readers.mlp_size)
        before = 0 if reads else config.recurrent_before(index)
        self.before = nnx.List([RecurrentLayer(config, rngs, dtype) for _ in range(before)])
        self.attention_norm = hidden_norm(config.pre_norm, config, dtype)
        latent = config.latent is not None
        self.attention = (
            LatentAttention(config, rngs, dtype) if latent else Attention(config, index, rngs, dtype, reads)
        )
        super().__init__(config, config.has_experts(index), rngs, dtype)
        self.input = TakesInput(config, rngs, dtype) if config.layer_input_size else None
        self.scalar = _one(dtype) if config.layer_scalars else None

    def __call__(
        self,
        x: Float[Array, "B N E"],
        layer: AttentionLayer,
        attend: Attend,
        cache: Any,
        mix: Mix = densely,
        own: Float[Array, "B N P"] | None = None,
    ) -> tuple[Float[Array, "B N E"], Any]:
        """Runs the layer from attention on, behind `recur`.

        Args:
            own: the inputs of this layer, where layers have them.
        """
        context, cache = self.attended(x, layer, attend, cache)

        def update(x: Float[Array, "B n E"], context: Float[Array, "B Hq n D"], *own: Array) -> Float[Array, "B n E"]:
            return self.after_attention(x, self.attention.project_out(context), mix, *own)

        return by_blocks(update, x, context, *([] if own is None else [own])), cache

    def after_attention(
        self,
        x: Float[Array, "B n E"],
        attention: Float[Array, "B n E"],
        mix: Mix,
        own: Float[Array, "B n P"] | None = None,
    ) -> Float[Array, "B n E"]:
        y = super().after_attention(x, attention, mix)
        if self.input is not None:
            assert own is not None
            y = self.input(y, own)
        return y if self.scalar is None else y * self.scalar[...]

    def recur(
        self,
        x: Float[Array, "B N E"],
        lengths: Int[Array, "B"] | None = None,
        states: Sequence[RecurrentState] | None = None,
        mix: Mix = densely,
    ) -> tuple[Float[Array, "B N E"], tuple[RecurrentState, ...]]:
        """Runs the recurrent layers that precede attention; without any it returns `x`.

        Args:
            x: hidden states of right-aligned tokens.
            lengths: the number of tokens of each row, of which the others are padding; None for N.
            states: of each recurrent layer before these tokens; None where a text begins.

        Returns:
            The hidden states, and the states after these tokens.
        """
        after = []
        for i, layer in enumerate(self.before):
            x, state = layer(x, lengths, None if states is None else states[i], mix)
            after.append(state)
        return x, tuple(after)

    def attended(
        self, x: Float[Array, "B N E"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        """The contexts of all heads, and the layer's cache."""
        return self.attention(maybe(self.attention_norm, x), replace(layer, residual=x), attend, cache)


def _one(dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.ones(1, dtype), out_sharding=("scalar",), eager_sharding=False)


class Decoder(nnx.Module):
    """The parameters of a decoder, and the functions that run it. Public functions take it as `params`.

    `params` is a Flax `nnx.Module` and a pytree: its leaves are the weights, and its `DecoderConfig` is static data in
    `params.config`, as is what a checkpoint says beside its weights, the `Card` in `params.card`. Pass it to `jax.jit`
    like any pytree. `params(tokens, attend, cache)` runs the layers, and `params.logits(hidden)` maps hidden states to
    next-token logits. `gates` holds learned tokens by name, such as those of `kvjax.with_gates`; a checkpoint of the
    model has none.

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
        self.readers = nnx.List([Layer(config, source, rngs, dtype, reads=True) for source in config.sources])
        self.inputs = LayerInputs(config, rngs, dtype) if config.layer_input_size else None
        self.norm = RMSNorm(config, (E,), ("embed",), dtype)
        self.unembed = None if config.tie_embeddings else weight(rngs, (E, V), ("embed", "vocab"), E, dtype)
        self.gates: nnx.Dict[Any] = nnx.Dict()

    def __call__(
        self, tokens: Int[Array, "B N"], attend: Attend, cache: Any = None, mix: Mix = densely
    ) -> tuple[Float[Array, "B N E"], Any]:
        """Runs the layers, unrolled. Recurrent layers begin a text with these tokens, none of which is padding.

        Token positions are not an argument, because only rotation and masking use them, and `attend` does both.

        Args:
            tokens: token ids.
            attend: the attention function. Every layer calls it with the cache that the layer before returned.
            cache: the first layer's cache; any pytree that `attend` accepts.
            mix: computes the mixtures of layers with experts. By default every expert treats every token.

        Returns:
            The hidden states before the last norm, in the dtype of the weights, and the last layer's cache.
        """
        x, given = self.embedding(tokens)
        attend, layers = lending(attend), [*self.layers, *self.readers]
        for i, (layer, record) in enumerate(zip(layers, [*self.attention_layers, *self.reading_layers], strict=True)):
            x, _ = layer.recur(x, mix=mix)
            x, cache = layer(x, record, attend, cache, mix, of_layer(given, i))
        return x, cache

    @property
    def embedding(self) -> Embedding:
        """The module that maps tokens to what the layers take, apart from the layers."""
        return Embedding(self.embed, self.config.embedding_scale, self.inputs)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The record of each layer that its attention function receives."""
        return [self._record(index, layer) for index, layer in enumerate(self.layers)]

    @property
    def reading_layers(self) -> list[AttentionLayer]:
        """The record of each reader: that of the layer whose entries it reads, with weights of its own."""
        return [self._record(source, layer) for source, layer in zip(self.config.sources, self.readers, strict=True)]

    def _record(self, index: int, layer: Layer) -> AttentionLayer:
        config = self.config
        return AttentionLayer(index, config.rope_of(index), **config.logits_of(index), **layer.attention.weights)

    def logits(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Returns next-token logits in float32.

        The last norm is applied here, not in `__call__`, because logits are needed at few positions of a prompt.
        """
        return self.head(hidden)

    @property
    def head(self) -> Head:
        """The module that maps hidden states to logits, apart from the layers."""
        return Head(self.config, self.norm, self.embed if self.unembed is None else self.unembed)
