"""Passes of tokens behind a prompt, for scores that measure them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Entries
from kvjax.models import Attend, AttentionLayer

Texts: TypeAlias = tuple[tuple[int, ...], ...]
"""The token ids of several texts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pass:
    """Tokens that run after a prompt, over its whole cache, and leave no entries.

    Attributes:
        tokens: right-aligned.
        lengths: tokens of each row; a row of length 0 takes no part.
        first: the first position of the part of the prompt that these tokens score.
        last: the position after that part.
        run: returns the entries once the score has observed them, for a pass that does more than to run forwards.
        gates: the name of gates with learned tokens, '' for none. `tokens` are then rows of these instead of the
            vocabulary, and the layers run with the adapters of the gates.
    """

    tokens: Int[Array, "B W"]
    lengths: Int[Array, "B"]
    first: Int[Array, "B"]
    last: Int[Array, "B"]
    run: Callable[[Replay], Entries] | None = field(default=None, metadata={"static": True})
    gates: str = field(default="", metadata={"static": True})

    @classmethod
    def learned(cls, gates: str, count: int, lengths: Int[Array, "B"]) -> Pass:
        """Returns the pass of the first `count` learned tokens of gates behind the whole prompt of each row."""
        tokens = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (lengths.shape[0], count))
        return cls(tokens, jnp.where(lengths > 0, count, 0), jnp.zeros_like(lengths), lengths, gates=gates)


class Replay(NamedTuple):
    """The arguments of a pass that runs itself.

    Attributes:
        layers: the decoder's layers with their records, each for a cache of that layer alone.
        hidden: the hidden states of the pass's tokens before the first layer.
        given: the inputs of all layers for these tokens, where layers have them.
        positions: of these tokens, -1 for padding.
        lengths: the number of these tokens in each row.
        entries: of the prompt.
        recurrent: the states of the recurrent layers before each layer, behind the prompt.
        attend: makes attention functions. That of `attend(measured=x)` has the score observe the layer, with x [B, W]
            for `Attended.measured`. That of `attend(instead=f)` has no score: the context is f(layer, q, k, v,
            positions, held), where q and k are rotated, and held are the layer's entries with the pass's own behind
            them, as arrays.
        mix: computes mixtures of experts.
    """

    layers: Sequence[tuple[Any, AttentionLayer]]
    hidden: Float[Array, "B W E"]
    given: Float[Array, "B W L P"] | None
    positions: Int[Array, "B W"]
    lengths: Int[Array, "B"]
    entries: Entries
    recurrent: Sequence[Any]
    attend: Callable[..., Attend]
    mix: Any
