"""KVCrush's selection: beside the important tokens, representatives of the others, by what heads think of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from kvjax.heads import ALL_HEADS, Heads
from kvjax.pallas_kernels import compact, top_tokens
from kvjax.policy import mark
from kvjax.protocols import Select, check_integer

from .budget import Fraction
from .select import TopTokens
from .signatures import Pages, Signatures

Granularity = Literal["token", "chunk", "page"]

ITERATIONS = 10  # of k-means

EVICTED, UPPER, IMPORTANT = 1, 2, 3  # how a head ranks a token; 0 if it does not hold it


@dataclass(frozen=True)
class Representatives:
    """A share of the budget for tokens that stand for all that the base leaves out (KVCrush, Algorithms 1 and 2).

    A token has a bit for each kv head of the layer: 1 if the head keeps it, or ranks it in the upper part of what it
    leaves out. Those that a head leaves out are sorted by the Hamming distance of their bits to an anchor, which is the
    same for all heads, and cut into as many runs of nearly equal length as there are representatives; of each run stays
    the token whose bits are nearest to the run's mean. While decoding, the base alone decides.

    Pages, tokens whose positions have the same quotient by `page`, may be kept or left as a whole instead. What is
    protected stays by itself, the other tokens of its page being a shorter one. A page scores the mean of its tokens
    and takes `page` entries of the budget however few it has, so slots may stay empty, unless all tokens fit.

    On a mesh that spreads kv heads, heads exchange a byte and a position for each entry, and a number for each bit.

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
        granularity: "token"; "chunk": a page is to all this what a token is, with one bit a head, by its mean score;
            "page": the bits of a page are those of its tokens side by side, 0 for a token that is not in it.
        page: tokens of a chunk or page.
    """

    base: Select
    share: float
    anchor: Literal["mean", "alternate", "random"] = "mean"
    pick: Literal["centroid", "grid", "kmeans"] = "centroid"
    upper: float = 0.5
    by_age: bool = False
    seed: int = 0
    granularity: Granularity = "token"
    page: int = 32

    def __post_init__(self) -> None:
        for name in ("share", "upper"):
            part = getattr(self, name)
            if isinstance(part, bool) or not isinstance(part, float) or not 0 < part < 1:
                raise ValueError(f"{name}={part!r}: accepted is a float above 0 and below 1")
        if self.anchor not in ("mean", "alternate", "random"):
            raise ValueError(f"anchor={self.anchor!r}: accepted are 'mean', 'alternate' and 'random'")
        if self.pick not in ("centroid", "grid", "kmeans"):
            raise ValueError(f"pick={self.pick!r}: accepted are 'centroid', 'grid' and 'kmeans'")
        if self.granularity not in get_args(Granularity):
            raise ValueError(f"granularity={self.granularity!r}: accepted are 'token', 'chunk' and 'page'")
        check_integer("page", self.page, least=1)
        check_integer("seed", self.seed, least=0)
        if isinstance(self.base, Representatives):
            raise ValueError("Representatives of what Representatives leave out: accepted is another base")
        if self.granularity != "token" and type(self.base) is not TopTokens:
            raise ValueError(
                f"Representatives with granularity={self.granularity!r} rank whole pages by their mean score, and "
                f"{type(self.base).__name__} chooses tokens; accepted with it is TopTokens"
            )
        if self.granularity == "page" and self.pick == "kmeans":
            raise ValueError("pick='kmeans' clusters tokens or chunks; accepted with granularity='page' is another")

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
        protected = jnp.isposinf(scores)
        free = counts - jnp.sum(protected, axis=-1)
        wanted = jnp.clip(free, 0, Fraction(self.share).capacity(0, counts, 1))
        compared = scores
        if self.by_age:
            compared = scores / (jnp.max(positions, axis=-1, keepdims=True) + 1 - positions)
        if self.granularity == "token":
            important = mark(self.base.keep(scores, positions, counts - wanted, size, heads), scores.shape[-1])
            left = ~important & (scores > -jnp.inf)
            bits = self._bits(compared, positions, important, left, heads)
            chosen = self._choose(Signatures(bits), scores, positions, left, wanted, self._most(size), heads)
            return compact(important | chosen, size)
        there = scores > -jnp.inf
        pages = Pages.of(positions, there & ~protected, self.page)
        page_scores = pages.mean(scores)
        wanted, room = wanted // self.page, jnp.maximum(free, 0) // self.page
        best = self.base.keep(page_scores, pages.numbers, room - wanted, max(1, size // self.page), heads)
        important = mark(best, scores.shape[-1])
        left = (pages.numbers >= 0) & ~important
        if self.granularity == "chunk":
            signatures = Signatures(self._bits(pages.mean(compared), pages.numbers, important, left, heads))
        else:
            kept = protected | pages.tell(important)
            bits = self._bits(compared, positions, kept, pages.tell(left), heads)
            signatures = Signatures(bits, pages.page, positions % self.page, self.page)
        chosen = self._choose(signatures, page_scores, pages.numbers, left, wanted, self._most(size), heads)
        kept = protected | pages.tell(important | chosen)
        within = jnp.sum(there, axis=-1, keepdims=True) <= counts[..., None]
        return compact(jnp.where(within, there, kept), size)

    def _most(self, size: int) -> int:
        """The most representatives that a head may have."""
        tokens = Fraction(self.share).slots(0, size, 1)
        return max(1, tokens if self.granularity == "token" else tokens // self.page)

    def _choose(
        self,
        signatures: Signatures,
        scores: Float[Array, "B H U"],
        numbers: Int[Array, "B H U"],
        left: Bool[Array, "B H U"],
        wanted: Int[Array, "B H"],
        most: int,
        heads: Heads,
    ) -> Bool[Array, "B H U"]:
        """Marks the representatives of those left out, tokens or pages."""
        wanted = jnp.minimum(wanted, jnp.sum(left, axis=-1))
        anchor = self._anchor(signatures, left, heads)
        chosen = self.representatives(signatures, anchor, left, numbers, wanted, most)
        if self.pick != "kmeans":
            return chosen
        rest = jnp.where(left & ~chosen, scores, -jnp.inf)
        missing = wanted - jnp.sum(chosen, axis=-1)
        return chosen | mark(top_tokens(rest, numbers, missing, size=most), scores.shape[-1])

    def representatives(
        self,
        signatures: Signatures,
        anchor: Bool[Array, "B #H W F"],
        left: Bool[Array, "B H U"],
        numbers: Int[Array, "B H U"],
        wanted: Int[Array, "B H"],
        most: int,
    ) -> Bool[Array, "B H U"]:
        """Marks `wanted` of those left out, at most as many as there are, and never more than `most`."""
        U = left.shape[-1]
        n = jnp.sum(left, axis=-1)
        distance = jnp.where(left, signatures.distance(anchor), jnp.iinfo(jnp.int32).max)
        _, _, order = jax.lax.sort((distance, numbers, jnp.broadcast_to(jnp.arange(U), left.shape)), num_keys=2)
        if self.pick == "grid":
            rank = _cuts(jnp.maximum(n - 1, 0), jnp.maximum(wanted - 1, 1), most)
            picked = jnp.take_along_axis(order, jnp.minimum(rank, U - 1), axis=-1)
            return mark(jnp.where(jnp.arange(most) < wanted[..., None], picked, -1), U)
        first = jnp.where(jnp.arange(most) < wanted[..., None], _cuts(n, jnp.maximum(wanted, 1), most), U)
        b, h = jnp.arange(left.shape[0])[:, None, None], jnp.arange(left.shape[1])[:, None]
        run = jnp.cumsum(jnp.zeros(left.shape, jnp.int32).at[b, h, first].set(1, mode="drop"), axis=-1) - 1
        run = jnp.zeros_like(run).at[b, h, order].set(run)
        run = jnp.where(left & (wanted[..., None] > 0), run, most)
        if self.pick == "kmeans":
            off, run = jax.vmap(jax.vmap(partial(_k_means, clusters=most)))(signatures.bits, run)
        else:
            off = signatures.distance_to_mean(run, most)
        return jax.vmap(jax.vmap(partial(_nearest, groups=most)))(off, run, numbers)

    def _bits(
        self,
        scores: Float[Array, "B H M"],
        numbers: Int[Array, "B H M"],
        important: Bool[Array, "B H M"],
        left: Bool[Array, "B H M"],
        heads: Heads,
    ) -> Bool[Array, "B H M F"]:
        """For each head's tokens or pages, what all F heads of the layer think of the same ones."""
        M = scores.shape[-1]
        ones = jnp.floor(jnp.sum(left, axis=-1) * self.upper).astype(jnp.int32)
        upper = mark(top_tokens(jnp.where(left, scores, -jnp.inf), numbers, ones, size=M), M)
        rank = jnp.where(important, IMPORTANT, jnp.where(upper, UPPER, jnp.where(left, EVICTED, 0))).astype(jnp.int8)
        return _of_every_head(rank, numbers, heads) >= UPPER

    def _anchor(self, signatures: Signatures, left: Bool[Array, "B H U"], heads: Heads) -> Bool[Array, "B 1 W F"]:
        B, _, _, F = signatures.bits.shape
        W = signatures.width
        if self.anchor == "mean":
            return heads.mean(signatures.excess(left)) > 1e-3  # a majority, were it of one head by one; not an error
        if self.anchor == "alternate":
            anchor = jnp.arange(W * F) % 2 == 1
        else:
            anchor = jax.random.bernoulli(jax.random.key(self.seed), shape=(W * F,))
        return jnp.broadcast_to(anchor.reshape(W, F), (B, 1, W, F))


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


def _k_means(
    bits: Bool[Array, "U F"], run: Int[Array, "U"], clusters: int
) -> tuple[Float[Array, "U"], Int[Array, "U"]]:
    """Lloyd's algorithm, begun with the runs: the square distance to the own cluster's centre, and the cluster."""
    points = bits.astype(jnp.float32)
    used = jnp.arange(clusters) <= jnp.max(jnp.where(run < clusters, run, -1))

    def distances(centres: Array) -> Array:
        squares = jnp.sum(points, axis=-1, keepdims=True) + jnp.sum(centres**2, axis=-1)
        return jnp.where(used, squares - 2 * points @ centres.T, jnp.inf)

    def improve(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        centres, cluster = state
        size = jax.ops.segment_sum(jnp.ones(cluster.shape), cluster, clusters + 1)[:clusters, None]
        sums = jax.ops.segment_sum(points, cluster, clusters + 1)[:clusters]
        centres = jnp.where(size > 0, sums / jnp.maximum(size, 1), centres)
        return (centres, jnp.where(run < clusters, jnp.argmin(distances(centres), axis=-1), clusters)), None

    start = jnp.zeros((clusters, bits.shape[1])), run
    (centres, cluster), _ = jax.lax.scan(improve, start, length=ITERATIONS)
    off = jnp.take_along_axis(distances(centres), jnp.minimum(cluster, clusters - 1)[:, None], axis=-1)[:, 0]
    return off, cluster


def _nearest(off: Array, group: Int[Array, "U"], numbers: Int[Array, "U"], groups: int) -> Bool[Array, "U"]:
    """Marks the member of each group with the smallest distance; of equal ones the earlier."""
    nearest = off == jax.ops.segment_min(off, group, groups + 1)[group]
    earliest = jax.ops.segment_min(jnp.where(nearest, numbers, jnp.iinfo(jnp.int32).max), group, groups + 1)
    return nearest & (numbers == earliest[group]) & (group < groups)
