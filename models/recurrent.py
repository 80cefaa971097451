"""The recurrent layer of hybrid models: a gated delta net (arXiv 2412.06464) and an MLP or experts."""

from __future__ import annotations

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .config import DecoderConfig
from .delta_rule import read_token, read_tokens
from .feed_forward import FeedForward, by_blocks
from .linear import heads_first, linear, weight
from .mixture import Mix
from .norm import hidden_norm, maybe, rms_normed
from .recurrence import RecurrentState

UNIT = 1e-6  # is added to the squared length of queries and keys before they are divided by their length


class GatedDeltaNet(nnx.Module):
    """The gated delta rule over queries, keys and values that a short causal convolution has mixed."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.recurrence is not None
        own, E = config.recurrence, config.hidden_size
        H, outputs = own.value_heads, own.value_heads * own.value_dim
        self.recurrence, self.epsilon = own, config.norm_epsilon
        self.inputs = weight(rngs, (E, own.inputs), ("embed", "recurrent"), E, dtype)
        self.convolution = weight(rngs, (own.inputs, own.taps), ("recurrent", "taps"), own.taps, dtype)
        self.gate = weight(rngs, (E, outputs), ("embed", "recurrent"), E, dtype)
        self.rate = weight(rngs, (E, H), ("embed", "recurrent"), E, dtype)
        self.decay = weight(rngs, (E, H), ("embed", "recurrent"), E, dtype)
        self.decay_bias = _vector(jnp.ones(H), dtype)
        self.log_decay = _vector(jnp.log(jax.random.uniform(rngs.params(), (H,), minval=1.0, maxval=16.0)), dtype)
        self.scale = _vector(jnp.ones(own.value_dim), dtype)
        self.output = weight(rngs, (outputs, E), ("recurrent", "embed"), outputs, dtype)

    def __call__(
        self, x: Float[Array, "B N E"], lengths: Int[Array, "B"] | None, state: RecurrentState | None
    ) -> tuple[Float[Array, "B H N D"], RecurrentState]:
        """Returns what each value head reads from its memory, and the state after these tokens.

        Args:
            x: hidden states of right-aligned tokens.
            lengths: the number of tokens of each row; the others are padding. None for N.
            state: before these tokens; None where a text begins.
        """
        B, N, _ = x.shape
        own = self.recurrence
        lengths = jnp.full(B, N) if lengths is None else lengths
        state = own.state(B, x.dtype) if state is None else state
        real = (jnp.arange(N) >= N - lengths[:, None])[..., None]
        inputs, window = _behind(state.window, jnp.where(real, linear(x, self.inputs[...], None), 0), lengths)
        mixed = jax.nn.silu(_convolved(inputs, self.convolution[...], N))
        keys = own.key_heads * own.key_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        group = own.value_heads // own.key_heads
        q, k = (jnp.repeat(_unit(heads_first(y, own.key_dim)), group, axis=1) for y in (q, k))
        rate = jnp.where(real, jax.nn.sigmoid(linear(x, self.rate[...], None).astype(jnp.float32)), 0)
        speed = jnp.exp(self.log_decay[...].astype(jnp.float32))
        decay = linear(x, self.decay[...], None).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
        log_decay = jnp.where(real, -speed * jax.nn.softplus(decay), 0)
        q, v = q * own.key_dim**-0.5, heads_first(v, own.value_dim)
        g, b = jnp.swapaxes(log_decay, 1, 2), jnp.swapaxes(rate, 1, 2)
        if N == 1:
            q, k, v, g, b = (y[:, :, 0] for y in (q, k, v, g, b))
            out, memory = read_token(q, k, v, g, b, state.memory)
            out = out[:, :, None]
        else:
            out, memory = read_tokens(q, k, v, g, b, state.memory)
        return out.astype(x.dtype), RecurrentState(window.astype(state.window.dtype), memory)

    def project_out(self, x: Float[Array, "B n E"], read: Float[Array, "B H n D"]) -> Float[Array, "B n E"]:
        """Returns the heads' normed outputs, times a gate of the input, projected back to hidden states."""
        normed = rms_normed(read, self.epsilon).astype(read.dtype)
        scaled = jnp.swapaxes(normed * self.scale[...], 1, 2).reshape(*x.shape[:2], -1)
        gate = jax.nn.silu(linear(x, self.gate[...], None).astype(jnp.float32))
        return linear((scaled * gate).astype(x.dtype), self.output[...], None)


class RecurrentLayer(FeedForward):
    """A layer whose tokens are mixed by a gated delta net in the place of attention."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: DTypeLike):
        self.norm = hidden_norm(config.pre_norm, config, dtype)
        self.net = GatedDeltaNet(config, rngs, dtype)
        super().__init__(config, config.mixture is not None, rngs, dtype)

    def __call__(
        self, x: Float[Array, "B N E"], lengths: Int[Array, "B"] | None, state: RecurrentState | None, mix: Mix
    ) -> tuple[Float[Array, "B N E"], RecurrentState]:
        """Returns the hidden states behind the layer, and its state. The arguments are those of `Layer.recur`."""
        read, state = self.net(maybe(self.norm, x), lengths, state)

        def update(x: Float[Array, "B n E"], read: Float[Array, "B H n D"]) -> Float[Array, "B n E"]:
            return self.after_attention(x, self.net.project_out(maybe(self.norm, x), read), mix)

        return by_blocks(update, x, read), state


def _vector(value: Float[Array, "size"], dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(value.astype(dtype), out_sharding=("recurrent",), eager_sharding=False)


def _behind(
    window: Float[Array, "B taps-1 inputs"], new: Float[Array, "B N inputs"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "B N+taps-1 inputs"], Float[Array, "B taps-1 inputs"]]:
    """Returns each row's new inputs with its window right before the first one, and the window after them.

    Padding, whose inputs are zeros, then lies before the window.
    """
    before, N = window.shape[1], new.shape[1]
    padded = jnp.pad(new, [(0, 0), (before, 0), (0, 0)])
    behind = jnp.arange(before + N) - (N - lengths)[:, None]  # the place in the window
    held = jnp.take_along_axis(window, jnp.clip(behind, 0, before - 1)[..., None], axis=1)
    joined = jnp.where(((behind >= 0) & (behind < before))[..., None], held.astype(new.dtype), padded)
    return joined, joined[:, N:]


def _convolved(
    inputs: Float[Array, "B N+taps-1 inputs"], kernel: Float[Array, "inputs taps"], size: int
) -> Float[Array, "B N inputs"]:
    """Returns the causal convolution of each channel by itself, in float32."""
    taps = kernel.astype(jnp.float32)
    return reduce(add, (inputs[:, i : i + size].astype(jnp.float32) * taps[:, i] for i in range(kernel.shape[1])))


def _unit(x: Float[Array, "B H N D"]) -> Float[Array, "B H N D"]:
    """Divides each vector by its length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT)
