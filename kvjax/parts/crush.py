"""KVCrush's selection: beside the important tokens, representatives of the others, by what heads think of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from kvjax.heads import ALL_HEADS, Heads
from kvjax.pallas_kernels import compact, top_tokens
from kvjax.policy import Select, check_integer, mark

from .budget import Fraction

ITERATIONS = 10  # of k-means

EVICTED, UPPER, IMPORTANT = 1, 2, 3  # how a head ranks a token; 0 if it does not hold it


@dataclass(frozen=True)
class Representatives:
    """A share of the budget for tokens that stand for all that the base leaves out (KVCrush, Algorithms 1 and 2).

    A token has a bit for each kv head of the layer: 1 if the head keeps it, or ranks it in the upper part of what it
    leaves out. Those that a head leaves out are sorted by the Hamming distance of their bits to an anchor, which is the
    same for all heads, and cut into as many runs of nearly equal length as there are representatives; of each run stays
    the token whose bits are nearest to the run's mean. While decoding, the base alone decides.

    On a mesh that spreads kv heads, heads exchange a byte and a position for each entry, and a number for each head.

    Attributes:
        base: which tokens are important.
        share: of each head's budget, for representatives; what is protected comes before them.
        anchor: bits that most of the tokens left out have ("mean"), 0101... ("alternate"), or bits drawn by the seed,
            the same for all rows and layers ("random").
        pick: of a run, the token nearest to its mean ("centroid"); or tokens at even steps along the sorted order, from
            its first to its last ("grid"); or of the clusters of k-means on the bits, begun with the runs, those
            nearest to the centre ("kmeans"; where a cluster is empty, the best token left out takes its place).
        upper: the part of the tokens left out that gets the bit 1.
        by_age: scores are sums over all queries so far, and are divided by the number of those that could see a token.
        seed: of the random anchor.
    """

    base: Select
    share: float
    anchor: Literal["mean", "alternate", "random"] = "mean"
    pick: Literal["centroid", "grid", "kmeans"] = "centroid"
    upper: float = 0.5
    by_age: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "upper"):
            part = getattr(self, name)
            if isinstance(part, bool) or not isinstance(part, float) or not 0 < part < 1:
                raise ValueError(f"{name}={part!r}: accepted is a float above 0 and below 1")
        if self.anchor not in ("mean", "alternate", "random"):
            raise ValueError(f"anchor={self.anchor!r}: accepted are 'mean', 'alternate' and 'random'")
        if self.pick not in ("centroid", "grid", "kmeans"):
            raise ValueError(f"pick={self.pick!r}: accepted are 'centroid', 'grid' and 'kmeans'")
        check_integer("seed", self.seed, least=0)
        if isinstance(self.base, Representatives):
            raise ValueError("Representatives of what Representatives leave out: accepted is another base")

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
        protected = jnp.sum(jnp.isposinf(scores), axis=-1)
        wanted = jnp.clip(counts - protected, 0, Fraction(self.share).capacity(0, counts, 1))
        important = mark(self.base.keep(scores, positions, counts - wanted, size, heads), scores.shape[-1])
        left = ~important & (scores > -jnp.inf)
        wanted = jnp.minimum(wanted, jnp.sum(left, axis=-1))
        bits = self._bits(scores, positions, important, left, heads)
        most = max(1, Fraction(self.share).slots(0, size, 1))
        chosen = self.representatives(bits, self._anchor(bits, left, heads), left, positions, wanted, most)
        if self.pick == "kmeans":
            rest = jnp.where(left & ~chosen, scores, -jnp.inf)
            missing = wanted - jnp.sum(chosen, axis=-1)
            chosen = chosen | mark(top_tokens(rest, positions, missing, size=most), scores.shape[-1])
        return compact(important | chosen, size)

    def representatives(
        self,
        bits: Bool[Array, "B H M F"],
        anchor: Bool[Array, "B #H F"],
        left: Bool[Array, "B H M"],
        positions: Int[Array, "B H M"],
        wanted: Int[Array, "B H"],
        most: int,
    ) -> Bool[Array, "B H M"]:
        """Marks `wanted` of the tokens left out, at most as many as there are, and never more than `most`."""
        M = left.shape[-1]
        n = jnp.sum(left, axis=-1)
        distance = jnp.sum(bits != anchor[:, :, None], axis=-1)
        distance = jnp.where(left, distance, bits.shape[-1] + 1)
        slots = jnp.broadcast_to(jnp.arange(M), left.shape)
        _, _, order = jax.lax.sort((distance, positions, slots), num_keys=2)
        if self.pick == "grid":
            rank = _cuts(jnp.maximum(n - 1, 0), jnp.maximum(wanted - 1, 1), most)
            picked = jnp.take_along_axis(order, jnp.minimum(rank, M - 1), axis=-1)
            return mark(jnp.where(jnp.arange(most) < wanted[..., None], picked, -1), M)
        first = jnp.where(jnp.arange(most) < wanted[..., None], _cuts(n, jnp.maximum(wanted, 1), most), M)
        b, h = jnp.arange(left.shape[0])[:, None, None], jnp.arange(left.shape[1])[:, None]
        run = jnp.cumsum(jnp.zeros(left.shape, jnp.int32).at[b, h, first].set(1, mode="drop"), axis=-1) - 1
        run = jnp.zeros_like(run).at[b, h, order].set(run)
        run = jnp.where(left & (wanted[..., None] > 0), run, most)
        choose = jax.vmap(jax.vmap(_nearest_to_k_means if self.pick == "kmeans" else _nearest_to_mean))
        return choose(bits, run, positions, first)

    def _bits(
        self,
        scores: Float[Array, "B H M"],
        positions: Int[Array, "B H M"],
        important: Bool[Array, "B H M"],
        left: Bool[Array, "B H M"],
        heads: Heads,
    ) -> Bool[Array, "B H M F"]:
        """For each head's entries, what all F heads of the layer think of the same tokens."""
        M = scores.shape[-1]
        if self.by_age:
            scores = scores / (jnp.max(positions, axis=-1, keepdims=True) + 1 - positions)
        ones = jnp.floor(jnp.sum(left, axis=-1) * self.upper).astype(jnp.int32)
        upper = mark(top_tokens(jnp.where(left, scores, -jnp.inf), positions, ones, size=M), M)
        rank = jnp.where(important, IMPORTANT, jnp.where(upper, UPPER, jnp.where(left, EVICTED, 0))).astype(jnp.int8)
        return _of_every_head(rank, positions, heads) >= UPPER

    def _anchor(self, bits: Bool[Array, "B H M F"], left: Bool[Array, "B H M"], heads: Heads) -> Bool[Array, "B 1 F"]:
        B, _, _, F = bits.shape
        if self.anchor == "mean":
            excess = jnp.sum(jnp.where(left[..., None], jnp.where(bits, 1.0, -1.0), 0.0), axis=2)
            return heads.mean(excess) > 1e-3  # a majority, were it of one head by one token; not a rounding error
        if self.anchor == "alternate":
            anchor = jnp.arange(F) % 2 == 1
        else:
            anchor = jax.random.bernoulli(jax.random.key(self.seed), shape=(F,))
        return jnp.broadcast_to(anchor, (B, 1, F))


def _of_every_head(rank: Int8[Array, "B H M"], positions: Int[Array, "B H M"], heads: Heads) -> Int8[Array, "B H M F"]:
    """How each of the layer's F heads ranks the token in each slot of these heads; 0 where it does not hold it."""
    ranks, where = heads.whole_layer(rank), heads.whole_layer(positions)
    B, H, M = rank.shape

    def slot_by_slot() -> Array:
        return jnp.broadcast_to(jnp.moveaxis(ranks, 1, -1)[:, None], (B, H, M, ranks.shape[1]))

    def search() -> Array:
        sorted_where, sorted_ranks = jax.lax.sort((where, ranks), num_keys=1)

        def look_up(tokens: Array, held: Array, ranked: Array) -> Array:
            at = jnp.minimum(jnp.searchsorted(held, tokens), M - 1)
            return jnp.where(held[at] == tokens, ranked[at], 0)

        by_other = jax.vmap(look_up, in_axes=(None, 0, 0), out_axes=-1)
        return jax.vmap(jax.vmap(by_other, in_axes=(0, None, None)))(positions, sorted_where, sorted_ranks)

    return jax.lax.cond(jnp.all(where == where[:, :1]), slot_by_slot, search)


def _cuts(n: Int[Array, "B H"], parts: Int[Array, "B H"], most: int) -> Int[Array, "B H most"]:
    """floor(i n / parts) for i = 0, 1, ..., without the product."""
    if most >= 2**16:
        raise ValueError(f"{most} representatives a head; accepted are fewer than {2**16}")
    whole, rest = jnp.divmod(n[..., None], parts[..., None])
    i = jnp.arange(most)
    carry = i.astype(jnp.uint32) * rest.astype(jnp.uint32) // parts[..., None].astype(jnp.uint32)
    return i * whole + carry.astype(jnp.int32)


def _nearest_to_mean(
    bits: Bool[Array, "M F"], run: Int[Array, "M"], positions: Int[Array, "M"], first: Int[Array, "R"]
) -> Bool[Array, "M"]:
    """Marks of each run the token nearest to the mean of its bits in L1; of equal ones the earlier."""
    R = first.shape[0]
    size = jax.ops.segment_sum(jnp.ones_like(run), run, R + 1)
    ones = jax.ops.segment_sum(bits.astype(jnp.int32), run, R + 1)
    off = jnp.sum(jnp.abs(bits * size[run][:, None] - ones[run]), axis=-1)  # the distance times the run's size, exact
    return _nearest(off, run, positions, R)


def _nearest_to_k_means(
    bits: Bool[Array, "M F"], run: Int[Array, "M"], positions: Int[Array, "M"], first: Int[Array, "R"]
) -> Bool[Array, "M"]:
    """The same of clusters, which begin as runs and are those of Lloyd's algorithm after some rounds."""
    R = first.shape[0]
    points = bits.astype(jnp.float32)
    used = jnp.arange(R) <= jnp.max(jnp.where(run < R, run, -1))

    def distances(centres: Array) -> Array:
        squares = jnp.sum(points, axis=-1, keepdims=True) + jnp.sum(centres**2, axis=-1)
        return jnp.where(used, squares - 2 * points @ centres.T, jnp.inf)

    def improve(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        centres, cluster = state
        size = jax.ops.segment_sum(jnp.ones(cluster.shape), cluster, R + 1)[:R, None]
        sums = jax.ops.segment_sum(points, cluster, R + 1)[:R]
        centres = jnp.where(size > 0, sums / jnp.maximum(size, 1), centres)
        return (centres, jnp.where(run < R, jnp.argmin(distances(centres), axis=-1), R)), None

    (centres, cluster), _ = jax.lax.scan(improve, (jnp.zeros((R, bits.shape[1])), run), length=ITERATIONS)
    off = jnp.take_along_axis(distances(centres), jnp.minimum(cluster, R - 1)[:, None], axis=-1)[:, 0]
    return _nearest(off, cluster, positions, R)


def _nearest(off: Array, group: Int[Array, "M"], positions: Int[Array, "M"], groups: int) -> Bool[Array, "M"]:
    """Marks the member of each group with the smallest distance; of equal ones the earlier."""
    nearest = off == jax.ops.segment_min(off, group, groups + 1)[group]
    earliest = jax.ops.segment_min(jnp.where(nearest, positions, jnp.iinfo(jnp.int32).max), group, groups + 1)
    return nearest & (positions == earliest[group]) & (group < groups)
