"""The half of a layer after attention: a gated MLP or experts, with norms and residuals, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .config import DecoderConfig
from .linear import bias, linear, weight
from .mixture import ExpertWeights, Mix
from .norm import hidden_norm, maybe, rms_normed

BLOCK = 8192  # the largest number of tokens, over all rows, in a block of `by_blocks`


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


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


class SharedExpert(MLP):
    """The MLP that every token takes beside its experts, in some families times sigmoid(x w)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.mixture is not None
        assert config.mixture.shared is not None
        super().__init__(replace(config, mlp_size=config.mixture.shared), rngs, dtype)
        E, gated = config.hidden_size, config.mixture.shared_gate
        self.share = weight(rngs, (E, 1), ("embed", "share"), E, dtype) if gated else None

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        y = super().__call__(x)
        return y if self.share is None else jax.nn.sigmoid(linear(x, self.share[...], None)) * y


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
        self.router_bias = bias(biased or config.mixture.sigmoid is not None, (X,), ("choices",), dtype)
        self.gate_bias = bias(biased, (X, F), ("experts", "expert_mlp"), dtype)
        self.up_bias = bias(biased, (X, F), ("experts", "expert_mlp"), dtype)
        self.down_bias = bias(biased, (X, E), ("experts", "embed"), dtype)

    def __call__(self, x: Float[Array, "B N E"], mix: Mix) -> Float[Array, "B N E"]:
        return mix(x, self.weights, self.mixture, ACTIVATIONS[self.activation])

    @property
    def weights(self) -> ExpertWeights:
        """The arrays that a mixture is computed from."""
        biases = self.router_bias, self.gate_bias, self.up_bias, self.down_bias
        return ExpertWeights(
            *(matrix[...] for matrix in (self.router, self.gate, self.up, self.down)),
            *(None if vector is None else vector[...] for vector in biases),
        )


class ExpertsBeside(Experts):
    """The experts of a layer that has an MLP, too (Gemma 4). What both give is normed and added.

    The router reads hidden states that are divided by their root mean square and sqrt(E), times a vector. Each expert
    has a factor of its shares.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, rngs, dtype)
        assert config.mixture is not None
        E, X = config.hidden_size, config.mixture.experts
        self.epsilon = config.norm_epsilon
        self.router_scale = nnx.Param(jnp.ones(E, dtype), out_sharding=("embed",), eager_sharding=False)
        self.factor = nnx.Param(jnp.ones(X, dtype), out_sharding=("choices",), eager_sharding=False)
        self.norm = hidden_norm(True, config, dtype)
        self.post_norm = hidden_norm(True, config, dtype)
        self.mlp_post_norm = hidden_norm(True, config, dtype)

    def beside(self, x: Float[Array, "B N E"], given: Float[Array, "B N E"], mix: Mix) -> Float[Array, "B N E"]:
        """Adds up what the MLP has `given` and what experts give, from hidden states before any norm."""
        judged = rms_normed(x, self.epsilon).astype(x.dtype) * self.router_scale[...]
        judged = (judged.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
        mixed = mix(maybe(self.norm, x), self.weights, self.mixture, ACTIVATIONS[self.activation], judged)
        return maybe(self.mlp_post_norm, given) + maybe(self.post_norm, mixed)

    @property
    def weights(self) -> ExpertWeights:
        return super().weights._replace(factor=self.factor[...])


class FeedForward(nnx.Module):
    """The half of a layer that follows attention or a recurrence: an MLP or experts, with norms and residuals."""

    def __init__(self, config: DecoderConfig, experts: bool, rngs: nnx.Rngs, dtype: DTypeLike):
        self.residual_scale = config.residual_scale
        self.attention_post_norm = hidden_norm(config.post_norm, config, dtype)
        self.mlp_norm = hidden_norm(config.pre_norm, config, dtype)
        beside = experts and config.mixture is not None and config.mixture.beside_mlp
        self.mlp = MLP(config, rngs, dtype) if beside or not experts else None
        self.experts = (ExpertsBeside if beside else Experts)(config, rngs, dtype) if experts else None
        shared = experts and config.mixture is not None and config.mixture.shared is not None
        self.shared = SharedExpert(config, rngs, dtype) if shared else None
        self.mlp_post_norm = hidden_norm(config.post_norm, config, dtype)

    def after_attention(
        self, x: Float[Array, "B n E"], attention: Float[Array, "B n E"], mix: Mix
    ) -> Float[Array, "B n E"]:
        """Returns the output of the layer, from its input and what attention or a recurrence adds to it."""
        x = x + self.scaled(maybe(self.attention_post_norm, attention))
        return x + self.scaled(maybe(self.mlp_post_norm, self.feed_forward(x, mix)))

    def feed_forward(self, x: Float[Array, "B n E"], mix: Mix) -> Float[Array, "B n E"]:
        """The MLP, or the mixture of experts in its place or beside it, and the expert that all tokens share."""
        normed = maybe(self.mlp_norm, x)
        if self.mlp is not None:
            given = self.mlp(normed)
            return self.experts.beside(x, given, mix) if isinstance(self.experts, ExpertsBeside) else given
        assert self.experts is not None
        mixed = self.experts(normed, mix)
        return mixed if self.shared is None else mixed + self.shared(normed)

    def scaled(self, x: Float[Array, "B n E"]) -> Float[Array, "B n E"]:
        """Returns what is added to the hidden states. A product with a factor of 1 would be one more kernel."""
        return x if self.residual_scale == 1 else (x.astype(jnp.float32) * self.residual_scale).astype(x.dtype)


def by_blocks(
    update: Callable[..., Float[Array, "B n E"]],
    x: Float[Array, "B N E"],
    context: Float[Array, "B Hq N D"],
    *others: Float[Array, "B N _"],
) -> Float[Array, "B N E"]:
    """Applies `update(x, context, *others)`, which treats each token by itself, to one block of tokens after another.

    The activations of the MLP are several times as large as the hidden states. With blocks, only those of one block are
    in memory. All blocks have the same size, of at most BLOCK tokens over all rows. There are at most twice as many
    blocks as BLOCK requires. If no such number divides N, `update` runs on all tokens at once.
    """
    B, N = x.shape[:2]
    least = -(-B * N // BLOCK)
    blocks = next((n for n in range(least, 2 * least + 1) if N % n == 0), 1)
    if blocks == 1:
        return update(x, context, *others)
    size = N // blocks
    x_blocks, *other_blocks = (array.reshape(B, blocks, size, -1) for array in (x, *others))
    context_blocks = context.reshape(*context.shape[:2], blocks, size, -1)

    def update_block(i: Int[Array, ""], x_blocks: Float[Array, "B blocks n E"]) -> Float[Array, "B blocks n E"]:
        x_block, *own = (jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in (x_blocks, *other_blocks))
        context_block = jax.lax.dynamic_index_in_dim(context_blocks, i, axis=2, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(x_blocks, update(x_block, context_block, *own), i, axis=1)

    return jax.lax.fori_loop(0, blocks, update_block, x_blocks).reshape(x.shape)
