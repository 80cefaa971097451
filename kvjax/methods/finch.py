"""FINCH (Corallo and Papotti, TACL 2024, arXiv 2408.00167): retains the part of a document that its question needs.

Differences from the paper and kvpress's FinchPress:

- The document is read at once. The paper reads it in pieces, each followed by the question, and compresses one piece
  before it reads the next.
- With `chunk`, every piece of the document retains the same share, as in kvpress, but the question is no part of a
  piece here.
- Keys keep the rotation of their own positions. `positions="in_cache"` is the form of the paper and of kvpress:
  retained keys are rotated to consecutive positions, which the answer continues.
- The question is the last `window` tokens of each row. kvpress looks for a delimiter token and takes one row at a time.
  A row whose question is shorter than the window is also scored by the end of its document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.pallas_kernels import Reduction, compact
from kvjax.policy import Policy, Protect, Ranked, TopTokens, check_integer

from .common.budgets import budget_of
from .common.window_attention import WindowAttention
from .registry import preset


@dataclass(frozen=True)
class EvenChunks(TopTokens):
    """Each head retains the highest scores of each chunk, and the same share of every chunk.

    Chunks are runs of `chunk` of the entries that are not protected, in order of position; the last run is shorter.
    With n such entries and room for c of them, a run of l retains floor(l c / n), and the first runs one more each
    until the budget is filled. While decoding it is TopTokens. It communicates nothing.

    Attributes:
        chunk: the number of entries per chunk.
    """

    chunk: int

    def __post_init__(self) -> None:
        check_integer("chunk", self.chunk, least=1)

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "other"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        scores, positions, counts, size, *_ = ranked
        B, H, M = scores.shape
        length = min(self.chunk, M)
        if length * size >= 2**31:
            raise ValueError(f"chunk={length} with a budget of {size} entries: expected a product below 2^31")
        competes = jnp.isfinite(scores)
        n = jnp.sum(competes, axis=-1)[..., None]
        room = jnp.clip(counts[..., None] - jnp.sum(jnp.isposinf(scores), axis=-1, keepdims=True), 0, n)
        chunk = jnp.where(competes, _places(positions, competes) // length, M)
        slots = jnp.broadcast_to(jnp.arange(M), scores.shape)
        *_, order = jax.lax.sort((chunk, -scores, positions, slots), num_keys=3)
        sizes = jnp.clip(n - length * jnp.arange(-(-M // length)), 0, length)
        shares = sizes * room // jnp.maximum(n, 1)
        missing = room - jnp.sum(shares, axis=-1, keepdims=True)
        shares += jnp.arange(shares.shape[-1]) < missing
        at = jnp.arange(M)
        chosen = (at < n) & (at % length < jnp.repeat(shares, length, axis=-1)[..., :M])
        b, h = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
        chosen = jnp.zeros(scores.shape, bool).at[b, h, order].set(chosen)
        return compact(chosen | jnp.isposinf(scores), size)


def _places(positions: Int[Array, "B H M"], counted: Bool[Array, "B H M"]) -> Int[Array, "B H M"]:
    """Returns the number of counted entries that precede each counted entry in order of position."""
    order = jnp.argsort(jnp.where(counted, positions, jnp.iinfo(jnp.int32).max), axis=-1)
    return jnp.argsort(order, axis=-1)


@preset
def finch(
    budget: int | float = 1024,
    window: int = 32,
    chunk: int | None = None,
    rescale: bool = True,
    positions: Literal["original", "in_cache"] = "original",
) -> Policy:
    """Compresses a prompt that ends with a question, by the attention from the question's tokens.

        score[h, c] = mean over the query group of h and the question's tokens r of n_r softmax(q_r . k)_c

    n_r is the number of tokens before r. The answer is added to the retained entries. `finch:positions=in_cache` is
    FINCH as in its paper.

    Args:
        budget: the number of entries retained of the prompt, the question included. An integer >= 1, or a float in
            (0, 1] for that share of each row's prompt.
        window: the number of tokens of the question, which are always retained.
        chunk: the number of document tokens per chunk, where all chunks retain the same share; None retains the best
            tokens of the document.
        rescale: multiplies by n_r. Without it each token of the question has the same total weight.
        positions: "in_cache" is the paper's form: the retained keys are rotated to consecutive positions, which the
            answer continues. "original" keeps each token at its own position.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + 1.
    """
    return Policy(
        score=WindowAttention(window, reduction=Reduction(rows="mean", group="mean"), rescale=rescale),
        budget=budget_of(budget),
        select=TopTokens() if chunk is None else EvenChunks(chunk),
        protect=Protect(recent=window),
        positions=positions,
    )
