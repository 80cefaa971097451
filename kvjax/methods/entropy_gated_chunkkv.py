"""ChunkKV gated by entropy (kvpress's EntropyGatedChunkKVPress, after arXiv 2502.00299): few tokens of spiky chunks.

A chunk whose score comes from single tokens is reduced to its best tokens, and other chunks take the room.

Differences from kvpress:

- Tokens that the base protects, such as the window of SnapKV, always stay, and their chunks count neither in the scores
  nor in the medians. kvpress gives them the highest score, with which they compete and count. Without protected tokens
  both retain the same entries.
- Scores are means over the kv heads, which gives the same order as kvpress's sums.
- Each row has chunks and medians of its own. kvpress takes those of the first row for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.policy import Policy, Ranked, Select, SelectWrapper, check_integer, check_kind

from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()
TINY = 1e-8  # in the shares of a chunk's tokens and in their logarithms, as in kvpress


@dataclass(frozen=True)
class GatedChunks(SelectWrapper):
    """Retains chunks of `length` consecutive positions in all heads, and only `few` tokens of those with low entropy.

    The score of a token is its mean over the kv heads of the layer. With p_t the share of token t in the sum of its
    chunk's scores, from which a negative minimum is subtracted, and n the number of its tokens,

        entropy = -sum p_t ln p_t / ln n

    A chunk is spiky if its mean score reaches the median of all chunks and its entropy is below theirs. Chunks are
    taken in order of their mean scores, of spiky ones the `few` best tokens. What is left of the budget takes the best
    of the other tokens. While decoding, the base alone decides.

    On a mesh that distributes kv heads, the heads exchange a score and a position per entry.

    Attributes:
        base: selects by the order that this gives. It must compare "scores".
        length: the number of positions in a chunk.
        few: the number of tokens that stay of a spiky chunk, below `length`.
    """

    length: int = 10
    few: int = 4

    def __post_init__(self) -> None:
        check_integer("few", self.few, least=1)
        check_integer("length", self.length, least=2)
        if self.few >= self.length:
            raise ValueError(f"few={self.few} with length={self.length}: expected fewer than a chunk has")
        check_kind("base", self.base, Select)
        if self.base.compares != "scores":
            raise ValueError(
                f"GatedChunks: its base selects by {type(self.base).__name__}; choose a base that retains the highest "
                "scores one by one, by TopTokens"
            )

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "means"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        scores, heads = ranked.scores, ranked.heads
        competes = jnp.isfinite(scores)
        whole = [heads.whole_layer(jnp.where(competes, x, -1)) for x in (scores, ranked.positions)]
        B, H, M = whole[0].shape
        order = jax.vmap(partial(_order, length=self.length, few=self.few))(*(x.reshape(B, -1) for x in whole))
        own = jnp.take(order.reshape(B, H, M), heads.kv_indices(scores.shape[1]), axis=1)
        return self.base.keep(ranked._replace(scores=jnp.where(competes, -own.astype(jnp.float32), scores)))


class _Groups(NamedTuple):
    """The number of each item's group, from 0, and the number of items of each group."""

    number: Int[Array, "n"]
    size: Int[Array, "n"]

    @classmethod
    def of(cls, key: Int[Array, "n"]) -> _Groups:
        """Groups items of equal keys, in order of their keys; items with the key -1 are in no group."""
        order = jnp.argsort(key)
        begins = jnp.diff(key[order], prepend=-1) > 0
        number = jnp.zeros_like(order).at[order].set(jnp.cumsum(begins) - 1)
        number = jnp.where(key < 0, key.size, number)
        return cls(number, jax.ops.segment_sum(jnp.ones_like(key), number, key.size))

    def sum(self, x: Float[Array, "n"]) -> Float[Array, "n"]:
        """The sum of each group."""
        return jax.ops.segment_sum(x, self.number, self.number.size)

    def first(self, x: Int[Array, "n"]) -> Int[Array, "n"]:
        """The smallest value of each group."""
        return jax.ops.segment_min(x, self.number, self.number.size)


def _order(scores: Float[Array, "n"], positions: Int[Array, "n"], *, length: int, few: int) -> Int[Array, "n"]:
    """Returns the place of each entry's token in the order in which tokens are retained. Position -1 is no entry."""
    tokens = _Groups.of(positions)
    there, size = tokens.size > 0, jnp.maximum(tokens.size, 1)
    score = tokens.sum(jnp.where(positions < 0, 0.0, scores)) / size
    position = jnp.where(there, tokens.first(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)), -1)
    chunks = _Groups.of(jnp.where(there, position // length, -1))
    mean, spiky = _spiky(score, there, chunks)
    rank = jnp.argsort(jnp.argsort(jnp.where(chunks.size > 0, -mean, jnp.inf)))
    own = jnp.where(there, rank[chunks.number], scores.size)
    ordered = jnp.lexsort((position, -score, own))
    place = jnp.zeros_like(ordered).at[ordered].set(jnp.arange(scores.size))
    within = place - chunks.first(place)[chunks.number]
    later = spiky[chunks.number] & (within >= few)
    best = jnp.argsort(jnp.argsort(-score))
    final = jnp.lexsort((jnp.where(later, best, place), later, ~there))
    return jnp.zeros_like(final).at[final].set(jnp.arange(scores.size))[tokens.number]


def _spiky(
    score: Float[Array, "n"], there: Bool[Array, "n"], chunks: _Groups
) -> tuple[Float[Array, "n"], Bool[Array, "n"]]:
    """Returns the mean score of each chunk, and which chunks are spiky."""
    size, some = jnp.maximum(chunks.size, 1), chunks.size > 0
    mean = chunks.sum(jnp.where(there, score, 0.0)) / size
    least = jax.ops.segment_min(jnp.where(there, score, 0.0), chunks.number, score.size)
    above = jnp.where(there, score - jnp.minimum(least, 0.0)[chunks.number], 0.0)
    share = above / (chunks.sum(above)[chunks.number] + TINY)
    entropy = -chunks.sum(share * jnp.log(share + TINY)) / jnp.log(jnp.maximum(size, 2))
    entropy = jnp.clip(jnp.where(size > 1, entropy, 0.0), 0.0, 1.0)

    def median(x: Float[Array, "n"]) -> Float[Array, ""]:
        return jnp.sort(jnp.where(some, x, jnp.inf))[jnp.maximum(jnp.sum(some) - 1, 0) // 2]

    return mean, some & (mean >= median(mean)) & (entropy < median(entropy))


@preset
def entropy_gated_chunkkv(base: Policy = SNAPKV, length: int = 10, few: int = 4) -> Policy:
    """Retains what another policy scores by chunks of text, and of chunks with a single peak only the best tokens.

        score of a chunk = mean over its tokens t and the kv heads h of the base's score[h, t]
        entropy = -sum p_t ln p_t / ln n,    p_t = share of token t in the chunk's score, n = number of its tokens

    Chunks are retained from the highest score on. Of one whose score is at least the median of all chunks and whose
    entropy is below their median, `few` tokens stay. The rest of the budget goes to the best of the other tokens.

    Args:
        base: the policy whose scores, budget and protected entries these are. Its selection must retain the highest
            scores one by one.
        length: the number of tokens in a chunk, counted from the beginning of the text.
        few: the number of tokens that stay of a chunk with a single peak, an integer in 1 .. length - 1.

    Raises:
        ValueError: for a value that is not accepted, or a base whose selection is not by scores alone, such as
            `chunkkv`.
    """
    check_kind("base", base, Policy)
    return replace(base, select=GatedChunks(base.select, length, few))
