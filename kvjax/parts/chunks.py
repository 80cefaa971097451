"""Selections by stretches of text: whole chunks, or the same share of each."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.heads import ALL_HEADS, Heads
from kvjax.pallas_kernels import compact
from kvjax.protocols import Select, check_integer

from .select import TopTokens


@dataclass(frozen=True)
class Chunks:
    """Tokens of a chunk stay or go together, in all heads: each scores what the chunk does in the mean (ChunkKV).

    A chunk is `length` positions of a row's own text. Its score is the mean over the entries of it that all kv heads of
    the layer hold, but for those that are protected. As ties go to the earlier position, the chunk that the budget has
    no room for as a whole is kept from its beginning. While decoding, the base alone decides.

    On a mesh that spreads kv heads, heads exchange a score and a position for each entry.

    Attributes:
        base: selects by the chunks' scores.
    """

    base: Select
    length: int = 20

    def __post_init__(self) -> None:
        check_integer("length", self.length, least=1)
        if isinstance(self.base, Chunks):
            raise ValueError("Chunks of what Chunks select: accepted is another base")

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        return self.base.victims(scores, positions, count)

    def keep(
        self,
        scores: Float[Array, "B H M"],
        positions: Int[Array, "B H M"],
        counts: Int[Array, "B H"],
        size: int,
        heads: Heads = ALL_HEADS,
    ) -> Int[Array, "B H size"]:
        competes = jnp.isfinite(scores)
        means = self._means(*(heads.whole_layer(jnp.where(competes, x, -1)) for x in (scores, positions)))
        own = jnp.take(means, heads.kv_indices(scores.shape[1]), axis=1)
        return self.base.keep(jnp.where(competes, own, scores), positions, counts, size, heads)

    def _means(self, scores: Float[Array, "B H M"], positions: Int[Array, "B H M"]) -> Float[Array, "B H M"]:
        """The mean score of each entry's chunk; positions are -1 where an entry does not compete."""

        def of_row(scores: Array, chunk: Array) -> Array:
            order = jnp.argsort(chunk)
            begins = jnp.diff(chunk[order], prepend=-2) > 0
            number = jnp.zeros_like(order).at[order].set(jnp.cumsum(begins) - 1)
            total, entries = (jax.ops.segment_sum(x, number, chunk.size) for x in (scores, jnp.ones_like(scores)))
            return (total / jnp.maximum(entries, 1))[number]

        B = scores.shape[0]
        chunk = jnp.where(positions < 0, -1, positions // self.length)
        return jax.vmap(of_row)(scores.reshape(B, -1), chunk.reshape(B, -1)).reshape(scores.shape)


@dataclass(frozen=True)
class EvenChunks(TopTokens):
    """Each head the highest scores of each chunk, of all chunks the same share.

    Chunks are runs of `length` of the entries that are not protected, in order of position, the last run being shorter.
    Of n entries and room for c, a run of l keeps floor(l c / n), the first runs one more until the budget is filled.
    While decoding it is TopTokens. It communicates nothing.
    """

    length: int = 512

    def __post_init__(self) -> None:
        check_integer("length", self.length, least=1)

    def keep(
        self,
        scores: Float[Array, "B H M"],
        positions: Int[Array, "B H M"],
        counts: Int[Array, "B H"],
        size: int,
        heads: Heads = ALL_HEADS,
    ) -> Int[Array, "B H size"]:
        B, H, M = scores.shape
        length = min(self.length, M)
        if length * size >= 2**31:
            raise ValueError(f"chunks of {length} with a budget of {size} entries; accepted is a product below 2^31")
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


def _places(positions: Int[Array, "B H M"], counted: Array) -> Int[Array, "B H M"]:
    """How many of the counted entries are before each in the text."""
    order = jnp.argsort(jnp.where(counted, positions, jnp.iinfo(jnp.int32).max), axis=-1)
    return jnp.argsort(order, axis=-1)
