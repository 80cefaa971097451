"""The recurrent layers of a hybrid model: where they are, their sizes, and the state that each keeps of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """The state of a recurrent layer after the tokens that it has read. Its size does not depend on their number.

    Attributes:
        window: the inputs of the convolution from the last tokens, the oldest first; zeros before a text.
        memory: the matrix of each value head, which maps keys to values. float32.
    """

    window: Float[Array, "B taps-1 inputs"]
    memory: Float[Array, "B heads key_dim value_dim"]


@dataclass(frozen=True)
class Recurrence:
    """The static description of the recurrent layers, each a gated delta net.

    Attributes:
        before: the number of recurrent layers that precede each attention layer.
        key_heads: the number of key heads, and of query heads.
        value_heads: the number of value heads, a multiple of `key_heads`.
        key_dim: channels of a key head.
        value_dim: channels of a value head.
        taps: the tokens that the convolution sees, the current one included.
    """

    before: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def inputs(self) -> int:
        """The channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def memory(self) -> tuple[int, int, int]:
        """The shape of a row's memory: value heads, channels of a key, channels of a value."""
        return self.value_heads, self.key_dim, self.value_dim

    def state(self, batch: int, dtype: DTypeLike) -> RecurrentState:
        """Returns the state before a text, with a window in `dtype`."""
        window = jnp.zeros((batch, self.taps - 1, self.inputs), dtype)
        return RecurrentState(window, jnp.zeros((batch, *self.memory), jnp.float32))

    def nbytes(self, dtype: DTypeLike) -> int:
        """Bytes of the states of one row, with windows in `dtype`."""
        window = (self.taps - 1) * self.inputs * jnp.dtype(dtype).itemsize
        return sum(self.before) * (window + 4 * math.prod(self.memory))
