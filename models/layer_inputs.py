"""Inputs of each layer beside the hidden states: by the token, and by its first hidden state (Gemma 4)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .config import DecoderConfig
from .feed_forward import ACTIVATIONS
from .linear import linear, weight
from .norm import RMSNorm, hidden_norm, maybe


class LayerInputs(nnx.Module):
    """Computes the inputs of all L layers, vectors of P channels each. Those of readers are the last ones.

    From a token's own embedding e of a layer, and its first hidden state x of E channels, follows

        input = (norm(x W / sqrt(E)) + sqrt(P) e) / sqrt(2).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        V, E, P = config.vocab_size, config.hidden_size, config.layer_input_size
        L = config.num_layers + len(config.sources)
        self.embed = weight(rngs, (V, L, P), ("vocab", "layers", "layer_input"), P, dtype)
        self.projection = weight(rngs, (E, L, P), ("embed", "layers", "layer_input"), E, dtype)
        self.norm = RMSNorm(config, (P,), ("layer_input",), dtype)

    def __call__(self, tokens: Int[Array, "B N"], x: Float[Array, "B N E"]) -> Float[Array, "B N L P"]:
        E, L, P = self.projection.shape
        own = self.embed[...][tokens] * jnp.asarray(P**0.5, x.dtype)
        projected = linear(x, self.projection[...].reshape(E, -1), None).astype(jnp.float32) * E**-0.5
        normed = self.norm(projected.astype(x.dtype).reshape(*x.shape[:-1], L, P))
        return ((normed + own).astype(jnp.float32) * 2**-0.5).astype(x.dtype)


class TakesInput(nnx.Module):
    """The last part of a layer, which adds norm((activation(x W) * input) U) to the hidden states x."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        E, P = config.hidden_size, config.layer_input_size
        self.activation = config.activation
        self.gate = weight(rngs, (E, P), ("embed", "layer_input"), E, dtype)
        self.projection = weight(rngs, (P, E), ("layer_input", "embed"), P, dtype)
        self.norm = hidden_norm(True, config, dtype)

    def __call__(self, x: Float[Array, "B n E"], own: Float[Array, "B n P"]) -> Float[Array, "B n E"]:
        gated = ACTIVATIONS[self.activation](linear(x, self.gate[...], None)) * own
        return x + maybe(self.norm, linear(gated, self.projection[...], None))
