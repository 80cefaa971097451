"""Scores by replay: more tokens are run over the whole cache of a prompt, to see what they attend to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.attention import replaying
from kvjax.cache import KVCache, LayerCache
from kvjax.models import Decoder
from kvjax.protocols import Attended, Score
from kvjax.spread import over_heads

Encode: TypeAlias = Callable[[str], Sequence[int]]
Texts: TypeAlias = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pass:
    """Tokens that follow a prompt, to be run and forgotten.

    Attributes:
        tokens: right-aligned.
        lengths: of each row; a row of length 0 takes no part.
        first: the first position of the part of the prompt that these tokens ask for.
        last: the position after it.
    """

    tokens: Int[Array, "B W"]
    lengths: Int[Array, "B"]
    first: Int[Array, "B"]
    last: Int[Array, "B"]


@dataclass(frozen=True)
class ReplayScore(Score):
    """What entries receive from tokens that are run after the prompt and leave no entries of their own."""

    @property
    def repeats_prompt(self) -> bool:
        """Whether the passes are made of the prompt's own tokens."""
        return True

    def texts(self, encode: Encode | None) -> Texts:
        """Token ids of whatever text the passes need. Raises ValueError if it has to be encoded and cannot."""
        return ()

    @abstractmethod
    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        """What to run after a prompt, right-aligned in `tokens`; how many and how long follows from shapes alone."""
        ...

    @abstractmethod
    def replayed(
        self, entries: LayerCache, attended: Attended, first: Int[Array, "B"], last: Int[Array, "B"]
    ) -> tuple[Any, Any]:
        """The new (per_slot, per_row) after a pass: its own tokens' entries are the last of `entries`."""
        ...


def as_ids(text: str | tuple[int, ...], encode: Encode | None, what: str) -> tuple[int, ...]:
    """A text's token ids. Raises ValueError, naming `what` it is, for words where there is no tokenizer."""
    if not text:
        return ()
    if not isinstance(text, str):
        return tuple(text)
    if encode is None:
        raise ValueError(f"{what}={text!r} is text and there is no tokenizer; accepted are tokenizer= or token ids")
    return tuple(encode(text))


def replay(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    """The same cache, of which the score has seen a pass."""
    score = cache.policy.score
    assert isinstance(score, ReplayScore)
    behind = jnp.arange(part.tokens.shape[1] - 1, -1, -1)
    end = cache.length + part.lengths
    positions = jnp.where(behind < part.lengths[:, None], end[:, None] - 1 - behind, -1)
    rows = {"positions": positions, "lengths": part.lengths, "first": part.first, "last": part.last}
    attend = over_heads(cache.mesh, partial(replaying, score.replayed, cache.policy.storage), **rows, rope=cache.rope)
    _, layers = params(part.tokens, attend, cache.layers)
    return replace(cache, layers=layers).in_place()
