"""Attention within chunks of a text that ignores causality: how much any token of a chunk attends to another one."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import finite_or_zero
from kvjax.policy import Attended, LayerShape, Moment, Needs, Score, check_integer

from .in_turns import in_turns
from .pooling import Pooling
from .window_attention import QueryRing

POOLING = Pooling("avg", 3)


@dataclass(frozen=True)
class NonCausalAttention(Score):
    """The attention received from all tokens of the same chunk, times the norm of the value, averaged over neighbours.

    Chunks are runs of positions after the first `sinks` tokens. Within a chunk every query sees every key, and logits
    are not scaled. The state is the sum over queries per slot, and as many of the last queries as the next call needs
    to go on with the last chunk. On a mesh where devices hold the same kv head, they exchange the group's queries.

    A layer with a sliding window sees the keys that are in its window when a piece of a prompt has been read. Pieces
    that are shorter than the window, and a whole prompt, may therefore give other scores there.

    Attributes:
        chunk: the number of tokens in a chunk.
        sinks: the number of first tokens that take no part.
        recent: the number of last tokens that take no part.
    """

    chunk: int = 256
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        check_integer("chunk", self.chunk, least=1)
        check_integer("sinks", self.sinks, least=0)
        check_integer("recent", self.recent, least=0)

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", keeps_queries=True, marks=frozenset({"weighs_values"}))

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], QueryRing]:
        sums = shape.per_slot()
        return sums, QueryRing.empty(shape, self.chunk + self.recent)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], QueryRing]:
        ring: QueryRing = entries.per_row
        W, R = attended.positions.shape[1], self.chunk + self.recent
        end = attended.positions[:, -1:] + 1
        begin = end - attended.lengths[:, None]  # of the new tokens
        # The chunks from the first one on of which a query is new, or was among the last tokens until now.
        start = jnp.maximum(begin - self.recent - self.sinks, 0) // self.chunk * self.chunk + self.sinks
        chunks = -(-(W + self.recent + self.chunk - 1) // self.chunk)
        at = start + jnp.arange(chunks * self.chunk)
        counted = at < end - self.recent
        new = jnp.clip(W - end + at, 0, W - 1)
        is_new = counted & (at >= begin)
        is_old = counted & (jnp.take_along_axis(ring.positions[:, 0], at % R, axis=1) == at)
        given = attended.heads.whole_groups(attended.queries)
        queries = jnp.where(
            is_new[:, None, :, None],
            jnp.take_along_axis(given, new[:, None, :, None], axis=2),
            jnp.take_along_axis(ring.queries, (at % R)[:, None, :, None], axis=2),
        )
        place = entries.positions - start[:, None]
        within = (place >= 0) & (place < at.shape[1]) & (entries.positions >= 0)
        index = _inverse(jnp.where(within, place, at.shape[1]), at.shape[1])
        sums = self._sums(entries, attended, queries, is_new | is_old, index, counted)
        mine = jnp.take_along_axis(sums, jnp.clip(place, 0, at.shape[1] - 1), axis=-1)
        mine = jnp.where(within & (entries.positions < end[:, None] - self.recent), mine, 0)
        changed = within & (attended.lengths > 0)[:, None, None]
        return jnp.where(changed, mine, entries.per_slot), ring.push(attended)

    def _sums(
        self,
        entries: Slots,
        attended: Attended,
        queries: Float[Array, "B Hq K D"],
        asks: Bool[Array, "B K"],
        index: Int[Array, "B H K"],
        counted: Bool[Array, "B K"],
    ) -> Float[Array, "B H K"]:
        """Returns the attention on tokens at K consecutive positions in their chunks, a mean over the query group."""
        B, H, K = index.shape
        keys = jnp.take_along_axis(entries.keys, jnp.maximum(index, 0)[..., None], axis=2)
        there = (index >= 0) & counted[:, None]
        bias = jnp.where(there, 0, -jnp.inf)
        if entries.bias is not None:
            bias += jnp.take_along_axis(entries.bias, jnp.maximum(index, 0), axis=2)
        place = jnp.arange(self.chunk)
        far = jnp.abs(place[:, None] - place) >= (attended.window or self.chunk)

        def by_chunk(x: Array, axis: int) -> Array:
            shape = (*x.shape[:axis], K // self.chunk, self.chunk, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        def of_chunk(chunk: tuple[Array, ...]) -> Array:
            """Handles one chunk, so that the weights of one chunk are in memory and not of all."""
            queries, asks, keys, bias = chunk
            grouped = queries.reshape(B, H, -1, *queries.shape[2:])
            logits = jnp.einsum("BHGWD,BHCD->BHGWC", grouped, keys, preferred_element_type=jnp.float32)
            logits = jnp.where(far, -jnp.inf, logits + bias[:, :, None, None])
            top = jnp.max(logits, axis=-1, keepdims=True)
            weights = jnp.exp(logits - finite_or_zero(top))
            weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
            return jnp.mean(jnp.sum(jnp.where(asks[:, None, None, :, None], weights, 0), axis=3), axis=2)

        queries = queries.reshape(B, -1, K, queries.shape[-1])
        sums = in_turns(of_chunk, (by_chunk(queries, 2), by_chunk(asks, 1), by_chunk(keys, 2), by_chunk(bias, 2)))
        return jnp.moveaxis(sums, 0, 2).reshape(B, H, K)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        scores = entries.per_slot * jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)
        return POOLING.along_text(scores, entries.positions, self.scored(entries, moment))

    def scored(self, entries: Slots, moment: Moment) -> Bool[Array, "B H M"]:
        """Returns the entries that take part."""
        return (entries.positions >= self.sinks) & (
            entries.positions < moment.next_position[:, None, None] - self.recent
        )


def _inverse(place: Int[Array, "B H M"], size: int) -> Int[Array, "B H size"]:
    """Returns the index of the entry at each place, -1 where there is none. Places beyond `size` are dropped."""
    b, h = jnp.arange(place.shape[0])[:, None, None], jnp.arange(place.shape[1])[:, None]
    none = jnp.full((*place.shape[:2], size), -1)
    return none.at[b, h, place].set(jnp.arange(place.shape[2]), mode="drop")
