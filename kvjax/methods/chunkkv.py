"""ChunkKV (Liu et al., NeurIPS 2025, arXiv 2502.00299): retains the entries that a score chooses by chunks of text.

The paper cuts the cached tokens into chunks of c, gives each chunk the sum of the attention that its tokens receive
from the last w queries, and retains the best floor(L_max / c) chunks and the last w tokens. Its released code is
kvpress's `ChunkKVPress`. If chunks end where the window begins and where the prompt ends, and the budget is a number of
whole chunks, this preset over `snapkv` retains what kvpress retains.

Differences from the paper and kvpress in all other cases:

| | here | paper | kvpress |
|---|---|---|---|
| score of a chunk | mean over its unprotected tokens | sum over its tokens | mean over its tokens |
| chunk that the window cuts | its older tokens compete by their own mean | by its sum | always retained: see below |
| budget | filled; the last chunk is cut | the window and whole chunks | floor(ratio * chunks) whole chunks |
| length | 20 by default | 10 (5 to 20 are nearly as good) | 20 by default |

- kvpress gives the tokens of the window a score above all others, which raises the mean of the chunk that the window
  cuts. With a length of 10, a window of 16 and a prompt of 160 tokens it therefore retains the 4 tokens before the
  window, which compete here.
- The paper may use the choice of one layer for the next layers. Here each layer chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policy import Policy, Ranked, Select, SelectWrapper, check_integer, check_kind

from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()


@dataclass(frozen=True)
class Chunks(SelectWrapper):
    """Retains the tokens of a chunk together, in all heads: each token gets the mean score of its chunk.

    A chunk is `length` consecutive positions of a row. Its score is the mean over the unprotected entries that the kv
    heads of the layer hold of it. Ties go to the earlier position, so the last chunk that the budget has room for is
    retained from its beginning up to the end of the budget. While decoding, the base alone decides.

    On a mesh that distributes kv heads, the heads exchange a score and a position per entry.

    Attributes:
        base: selects by the scores of the chunks. It must compare "scores".
        length: the number of positions in a chunk.
    """

    length: int = 20

    def __post_init__(self) -> None:
        check_integer("length", self.length, least=1)
        check_kind("base", self.base, Select)
        if self.base.compares != "scores":
            raise ValueError(
                f"Chunks: its base selects by {type(self.base).__name__}; choose a base that retains the highest "
                "scores one by one, by TopTokens"
            )

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "means"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        scores, heads = ranked.scores, ranked.heads
        competes = jnp.isfinite(scores)
        means = self._means(*(heads.whole_layer(jnp.where(competes, x, -1)) for x in (scores, ranked.positions)))
        own = jnp.take(means, heads.kv_indices(scores.shape[1]), axis=1)
        return self.base.keep(ranked._replace(scores=jnp.where(competes, own, scores)))

    def _means(self, scores: Float[Array, "B H M"], positions: Int[Array, "B H M"]) -> Float[Array, "B H M"]:
        """Returns the mean score of each entry's chunk. Positions are -1 where an entry does not compete."""

        def of_row(scores: Array, chunk: Array) -> Array:
            order = jnp.argsort(chunk)
            begins = jnp.diff(chunk[order], prepend=-2) > 0
            number = jnp.zeros_like(order).at[order].set(jnp.cumsum(begins) - 1)
            total, entries = (jax.ops.segment_sum(x, number, chunk.size) for x in (scores, jnp.ones_like(scores)))
            return (total / jnp.maximum(entries, 1))[number]

        B = scores.shape[0]
        chunk = jnp.where(positions < 0, -1, positions // self.length)
        return jax.vmap(of_row)(scores.reshape(B, -1), chunk.reshape(B, -1)).reshape(scores.shape)


@preset
def chunkkv(base: Policy = SNAPKV, length: int = 20) -> Policy:
    """Retains the entries that another policy scores by chunks of text, the same chunks in all kv heads.

        score[c] = mean over kv heads h and tokens t of the chunk of c of the base's score[h, t]

    The entries that the base protects, such as the window of SnapKV, always stay and do not count in the mean of their
    chunk. The budget is filled: the last chunk is cut where the budget ends. Decoding is the base's own: the answer is
    added to the cache, or single tokens are evicted by the base's scores.

    Args:
        base: the policy whose scores, budget and protected entries these are. Its selection must retain the highest
            scores one by one.
        length: the number of tokens in a chunk, counted from the beginning of the text. The default is kvpress's; the
            paper's is 10.

    Raises:
        ValueError: for a `length` below 1, or a base whose selection is not by scores alone, such as another `chunkkv`.
    """
    check_kind("base", base, Policy)
    return replace(base, select=Chunks(base.select, length))
