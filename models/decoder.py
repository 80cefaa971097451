"""One decoder for all families: pre-norm, rotary grouped-query attention, gated MLP. Knows of no cache and no policy.

Attention is an argument. A layer computes q, k and v, hands them *before rotation* to `attend` together with the
opaque cache, and projects what comes back; what a cache is, and which tokens a query sees, is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .config import DecoderConfig
from .rope import Rope

BLOCK = 8192  # tokens of a batch of prompts whose activations in the MLP are held at once


@dataclass(frozen=True)
class AttentionLayer:
    """What an attention function may know of the layer that calls it."""

    index: int
    rope: Rope
    window: int | None
    scale: float
    output: Float[Array, "Hq D M"]


class Attend(Protocol):
    """Attention as an argument: rotates q and k, attends, and returns the context and the updated cache."""

    def __call__(
        self,
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
        /,
    ) -> tuple[Float[Array, "B Hq N D"], Any]: ...


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    """A normal weight of variance 1 / fan_in, marked with its logical axes (sharding maps them onto a mesh)."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), out_sharding=axes, eager_sharding=False)


def bias(wanted: bool, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param | None:
    """Zeros, or None where a family has no such bias."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False) if wanted else None


def linear(x: Float[Array, "... I"], weight: Float[Array, "I O"], bias: nnx.Param | None) -> Float[Array, "... O"]:
    product = x @ weight
    return product if bias is None else product + bias[...].reshape(-1)


class RMSNorm(nnx.Module):
    """Over the last axis."""

    def __init__(self, size: int, axis: str, epsilon: float, dtype: DTypeLike):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(size, dtype), out_sharding=(axis,), eager_sharding=False)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Projections to query, key and value heads and back; some families have biases or norms of q and k heads."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        M, Hq, H, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.query = weight(rngs, (M, Hq, D), ("embed", "heads", "head_dim"), M, dtype)
        self.key = weight(rngs, (M, H, D), ("embed", "kv_heads", "head_dim"), M, dtype)
        self.value = weight(rngs, (M, H, D), ("embed", "kv_heads", "head_dim"), M, dtype)
        self.output = weight(rngs, (Hq, D, M), ("heads", "head_dim", "embed"), Hq * D, dtype)
        self.query_bias = bias(config.qkv_bias, (Hq, D), ("heads", "head_dim"), dtype)
        self.key_bias = bias(config.qkv_bias, (H, D), ("kv_heads", "head_dim"), dtype)
        self.value_bias = bias(config.qkv_bias, (H, D), ("kv_heads", "head_dim"), dtype)
        self.output_bias = bias(config.output_bias, (M,), ("embed",), dtype)
        self.query_norm = RMSNorm(D, "head_dim", config.norm_epsilon, dtype) if config.qk_norm else None
        self.key_norm = RMSNorm(D, "head_dim", config.norm_epsilon, dtype) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "B N M"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        q = _split_heads(x, self.query[...], self.query_bias)
        k = _split_heads(x, self.key[...], self.key_bias)
        v = _split_heads(x, self.value[...], self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return attend(layer, q, k, v, cache)

    def joined(self, context: Float[Array, "B Hq N D"]) -> Float[Array, "B N M"]:
        """The heads' contexts, projected back."""
        B, Hq, N, D = context.shape
        flat = jnp.swapaxes(context, 1, 2).reshape(B, N, Hq * D)
        return linear(flat, self.output[...].reshape(Hq * D, -1), self.output_bias)


def _split_heads(
    x: Float[Array, "B N M"], projection: Float[Array, "M H D"], bias: nnx.Param | None
) -> Float[Array, "B H N D"]:
    """x . projection, heads first. A plain product, kept apart: else XLA turns the weights, not the activations."""
    M, H, D = projection.shape
    product = jax.lax.optimization_barrier(linear(x, projection.reshape(M, H * D), bias))
    return jnp.swapaxes(product.reshape(*x.shape[:2], H, D), 1, 2)


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        M, F = config.hidden_size, config.mlp_size
        self.gate = weight(rngs, (M, F), ("embed", "mlp"), M, dtype)
        self.up = weight(rngs, (M, F), ("embed", "mlp"), M, dtype)
        self.down = weight(rngs, (F, M), ("mlp", "embed"), F, dtype)
        self.gate_bias = bias(config.mlp_bias, (F,), ("mlp",), dtype)
        self.up_bias = bias(config.mlp_bias, (F,), ("mlp",), dtype)
        self.down_bias = bias(config.mlp_bias, (M,), ("embed",), dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        gate, up = linear(x, self.gate[...], self.gate_bias), linear(x, self.up[...], self.up_bias)
        return linear(jax.nn.silu(gate) * up, self.down[...], self.down_bias)


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        self.attention_norm = RMSNorm(config.hidden_size, "embed", config.norm_epsilon, dtype)
        self.attention = Attention(config, rngs, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, "embed", config.norm_epsilon, dtype)
        self.mlp = MLP(config, rngs, dtype)

    def __call__(
        self, x: Float[Array, "B N M"], layer: AttentionLayer, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B N M"], Any]:
        context, cache = self.attention(self.attention_norm(x), layer, attend, cache)

        def rest(x: Float[Array, "B n M"], context: Float[Array, "B Hq n D"]) -> Float[Array, "B n M"]:
            x = x + self.attention.joined(context)
            return x + self.mlp(self.mlp_norm(x))

        return by_blocks(rest, x, context), cache


def by_blocks(
    update: Callable[[Float[Array, "B n M"], Float[Array, "B Hq n D"]], Float[Array, "B n M"]],
    x: Float[Array, "B N M"],
    context: Float[Array, "B Hq N D"],
) -> Float[Array, "B N M"]:
    """`update` of all tokens, which looks at each by itself. Of long prompts some at a time, so that what the MLP holds
    meanwhile, several times the hidden states, is that of a block.

    A length that does not divide into blocks of equal size, at least half of BLOCK, is taken at once.
    """
    B, N = x.shape[:2]
    least = -(-B * N // BLOCK)
    blocks = next((n for n in range(least, 2 * least + 1) if N % n == 0), 1)
    if blocks == 1:
        return update(x, context)
    size = N // blocks
    parts = x.reshape(B, blocks, size, -1)
    seen = context.reshape(*context.shape[:2], blocks, size, -1)

    def one(i: Int[Array, ""], parts: Float[Array, "B blocks n M"]) -> Float[Array, "B blocks n M"]:
        own = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        found = update(own, jax.lax.dynamic_index_in_dim(seen, i, axis=2, keepdims=False))
        return jax.lax.dynamic_update_index_in_dim(parts, found, i, axis=1)

    return jax.lax.fori_loop(0, blocks, one, parts).reshape(x.shape)


class Decoder(nnx.Module):
    """The parameters of a decoder, with its config as static data. A pytree: pass it to `jax.jit` as it is."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        V, M = config.vocab_size, config.hidden_size
        self.config = config
        self.embed = weight(rngs, (V, M), ("vocab", "embed"), M, dtype)
        self.layers = nnx.List([Layer(config, rngs, dtype) for _ in config.windows])
        self.norm = RMSNorm(M, "embed", config.norm_epsilon, dtype)
        self.unembed = None if config.tie_embeddings else weight(rngs, (M, V), ("embed", "vocab"), M, dtype)

    def __call__(
        self, tokens: Int[Array, "B N"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B N M"], Any]:
        """Runs the layers, unrolled, and returns the hidden states and the cache that `attend` left.

        Token positions are not an argument: they matter to rotation and masking only, which are `attend`'s.
        """
        x = self.embed[...][tokens]
        for layer, record in zip(self.layers, self.attention_layers, strict=True):
            x, cache = layer(x, record, attend, cache)
        return x, cache

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """What each layer tells the attention function of itself."""
        return [
            AttentionLayer(index, self.config.rope, window, self.config.scale, output=layer.attention.output[...])
            for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True))
        ]

    def logits(self, hidden: Float[Array, "... M"]) -> Float[Array, "... V"]:
        """Next-token logits in float32. The last norm is theirs: of a prompt, few hidden states are asked for them."""
        hidden = self.norm(hidden)
        if self.unembed is None:
            return jnp.einsum("...M,VM->...V", hidden, self.embed[...], preferred_element_type=jnp.float32)
        return jnp.einsum("...M,MV->...V", hidden, self.unembed[...], preferred_element_type=jnp.float32)
