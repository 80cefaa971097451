"""The host's part in the next token of each row, as arrays: allowed tokens, and numbers that are added to logits.

Axes: B batch, V vocabulary, K tokens with a number, X words of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

TOP = 20  # tokens whose log-probabilities a step of guided rows reports


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGuides:
    """The guides of rows for one token.

    Attributes:
        allowed: a bit per token, the lowest of a word first. Logits of other tokens become -inf.
        ids: tokens with a number, each once; V pads.
        biases: the numbers.
    """

    allowed: UInt32[Any, "B X"]
    ids: Int32[Any, "B K"]
    biases: Float32[Any, "B K"]

    @classmethod
    def none(cls, rows: int, vocab_size: int, size: int) -> RowGuides:
        """Guides that change nothing, as NumPy arrays, with room for `size` numbers per row."""
        return cls(
            allowed=np.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32),
            ids=np.full((rows, size), vocab_size, np.int32),
            biases=np.zeros((rows, size), np.float32),
        )

    def __call__(self, logits: Float[Array, "B V"]) -> Float32[Array, "B V"]:
        """The logits that a token is drawn from."""
        logits = logits.astype(jnp.float32)
        rows, vocab_size = logits.shape
        bits = (self.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(rows, -1)[:, :vocab_size] == 1
        biased = logits.at[jnp.arange(rows)[:, None], self.ids].add(self.biases, mode="drop")
        return jnp.where(allowed, biased, -jnp.inf)


def most_probable_tokens(logits: Float[Array, "B V"]) -> Int32[Array, "2 K B"]:
    """The K = min(TOP, V) most probable tokens of each row under softmax(logits), and their log-probabilities' bits."""
    logits = logits.astype(jnp.float32)
    largest, ids = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
    log_probs = largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.stack([ids, jax.lax.bitcast_convert_type(log_probs, jnp.int32)]).transpose(0, 2, 1)
