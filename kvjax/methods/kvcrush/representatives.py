"""KVCrush's selection: beside the important tokens, it retains representatives of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import mark
from kvjax.checks import shown
from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import compact, top_tokens
from kvjax.policy import (
    Policy,
    Ranked,
    Select,
    SelectWrapper,
    check_choice,
    check_kind,
    check_number,
    share_of,
)

from .pages import PageMap, check_entrywise, check_page, fill
from .query_heads import by_query_head
from .signatures import Signatures

Granularity = Literal["token", "chunk", "page"]

ITERATIONS = 10  # of k-means


@dataclass(frozen=True)
class Representatives(SelectWrapper):
    """Gives a share of the budget to tokens that represent those that the base leaves out (KVCrush, Algorithms 1, 2).

    A token has one bit per head of the layer: 1 if the head retains it, or ranks it in the upper part of the tokens
    that it leaves out. The tokens that a kv head leaves out are sorted by the Hamming distance of their bits to an
    anchor, which is the same for all heads, and cut into as many runs of nearly equal length as there are
    representatives. Of each run the token with the bits nearest to the run's mean is retained. While decoding, the base
    alone decides.

    Pages, which are tokens whose positions have one quotient by `page`, may be retained or left out together instead.
    Protected tokens stay by themselves; the other tokens of their page are a shorter page. A page scores the mean of
    its tokens and takes `page` entries of the budget however few tokens it has, so slots may stay empty, unless all
    tokens fit.

    On a mesh that distributes kv heads, heads exchange a position and one byte per bit for each entry, and a number for
    each bit.

    Attributes:
        base: decides which tokens are important.
        share: the share of each head's budget for representatives. Protected tokens come before them.
        anchor: the bits that most of the tokens left out have ("mean"), 0101... ("alternate"), or an integer >= 0, the
            seed of random bits, the same for all rows and layers.
        pick: of a run the token nearest to its mean ("centroid"); or tokens at even steps along the sorted order, from
            its first to its last ("grid"); or, of the clusters that k-means makes of the bits, starting from the runs,
            the tokens nearest to the centres ("kmeans"; an empty cluster gives its place to the highest score left).
        upper: the part of the tokens left out that gets the bit 1; 0.0 gives it to retained tokens only.
        by_age: whether scores are sums over all queries so far, and are divided by the number of queries that could see
            the token before they are compared for bits.
        granularity: "token"; "chunk": a page is treated as a token is, with one bit per head, by its mean score;
            "page": the bits of a page are those of its tokens side by side, 0 for a token that the page lacks.
        page: the number of tokens in a chunk or page.
        bits: "kv": one bit per kv head, by the policy's scores; "query": one bit per query head, by the state of
            `QueryHeadAttention`. A query head's ones are the tokens that it ranks highest, as many as its kv head has.
    """

    share: float
    anchor: Literal["mean", "alternate"] | int = "mean"
    pick: Literal["centroid", "grid", "kmeans"] = "centroid"
    upper: float = 0.5
    by_age: bool = False
    granularity: Granularity = "token"
    page: int = 32
    bits: Literal["kv", "query"] = "kv"

    def __post_init__(self) -> None:
        check_kind("base", self.base, Select)
        check_number("share", self.share, "a float above 0 and below 1", lambda x: isinstance(x, float) and 0 < x < 1)
        check_number("upper", self.upper, "a float in [0, 1)", lambda x: isinstance(x, float) and 0 <= x < 1)
        seed = isinstance(self.anchor, int) and not isinstance(self.anchor, bool) and 0 <= self.anchor < 2**31
        if not seed and self.anchor not in ("mean", "alternate"):
            raise ValueError(
                f"anchor={shown(self.anchor)}: expected 'mean', 'alternate' or an integer in 0 .. {2**31 - 1}, the "
                "seed of a random anchor"
            )
        check_choice("pick", self.pick, "centroid", "grid", "kmeans")
        check_choice("granularity", self.granularity, *get_args(Granularity))
        check_choice("bits", self.bits, "kv", "query")
        check_page(self.page)
        if isinstance(self.base, Representatives):
            raise ValueError("Representatives: its base selects representatives already; choose another")
        if self.granularity != "token":
            check_entrywise(self.base)
        if self.granularity == "page" and self.pick == "kmeans":
            raise ValueError(
                "pick='kmeans': expected another one with granularity='page', as it clusters tokens or chunks"
            )

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "other" if self.granularity == "token" else "means"

    def check(self, policy: Policy) -> None:
        if self.bits == "query" and "query_heads" not in policy.score.needs.marks:
            raise ValueError(
                f"bits='query' compares query heads, and the score {type(policy.score).__name__} has no scores of "
                "single query heads; expected QueryHeadAttention of it"
            )

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        scores, positions, counts, size, heads, _ = ranked
        B, H, M = scores.shape
        compared = self._compared(ranked).reshape(B, H, -1, M)
        protected, there = jnp.isposinf(scores), scores > -jnp.inf
        free = counts - jnp.sum(protected, axis=-1)
        wanted = jnp.clip(free, 0, share_of(self.share, counts))
        if self.granularity == "token":
            important = mark(self.base.keep(ranked._replace(counts=counts - wanted)), M)
            left = there & ~important
            bits = self._bits(compared, positions, important, left, protected, heads)
            chosen = self._choose(Signatures(bits), scores, positions, left, wanted, self._most(size), heads)
            return compact(important | chosen, size)
        pages = PageMap.of(positions, there & ~protected, self.page)
        page_scores = pages.mean(scores)
        wanted, room = wanted // self.page, jnp.maximum(free, 0) // self.page
        best = self.base.keep(Ranked(page_scores, pages.numbers, room - wanted, max(1, size // self.page), heads))
        important = mark(best, M)
        left = (pages.numbers >= 0) & ~important
        if self.granularity == "chunk":
            compared = jnp.stack([pages.mean(compared[:, :, g]) for g in range(compared.shape[2])], axis=2)
            none = jnp.zeros_like(important)
            signatures = Signatures(self._bits(compared, pages.numbers, important, left, none, heads))
        else:
            kept = protected | pages.tell(important)
            bits = self._bits(compared, positions, kept, pages.tell(left), protected, heads)
            signatures = Signatures(bits, pages.page, positions % self.page, self.page)
        chosen = self._choose(signatures, page_scores, pages.numbers, left, wanted, self._most(size), heads)
        return fill(protected | pages.tell(important | chosen), there, counts, size)

    def _compared(self, ranked: Ranked) -> Float[Array, "B F M"]:
        """Returns the scores that bits are made of, of each kv head or of each query head."""
        if self.bits == "query":
            assert ranked.entries is not None
            return by_query_head(ranked.entries)
        if self.by_age:
            return ranked.scores / (jnp.max(ranked.positions, axis=-1, keepdims=True) + 1 - ranked.positions)
        return ranked.scores

    def _most(self, size: int) -> int:
        """Returns the most representatives that a head may have."""
        tokens = max(1, share_of(self.share, size))
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
        """Marks the representatives of the tokens or pages left out."""
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
            run = jax.vmap(jax.vmap(partial(_k_means, clusters=most)))(signatures.bits, run)
        off = signatures.distance_to_mean(run, most)  # of bits, it orders a run as the square distance does
        return jax.vmap(jax.vmap(partial(_nearest, groups=most)))(off, run, numbers)

    def _bits(
        self,
        scores: Float[Array, "B H G M"],
        numbers: Int[Array, "B H M"],
        important: Bool[Array, "B H M"],
        left: Bool[Array, "B H M"],
        protected: Bool[Array, "B H M"],
        heads: Heads,
    ) -> Bool[Array, "B H M F"]:
        """Returns the bits of all F heads of the layer for each head's tokens or pages."""
        B, H, G, M = scores.shape
        upper = share_of(self.upper, jnp.sum(left, axis=-1))
        ranked, ones = left, upper
        if self.bits == "query":  # a query head ranks anew what its kv head has retained for its score
            ranked = (left | important) & ~protected
            ones = upper + jnp.sum(important & ~protected, axis=-1)

        def per_head(x: Array) -> Array:
            return jnp.repeat(x, G, axis=1)

        competing = jnp.where(per_head(ranked), scores.reshape(B, H * G, M), -jnp.inf)
        highest = mark(top_tokens(competing, per_head(numbers), per_head(ones), size=M), M).reshape(B, H, G, M)
        always = protected if self.bits == "query" else important
        return _of_every_head(jnp.moveaxis(always[:, :, None] | highest, 2, 3), numbers, heads)

    def _anchor(self, signatures: Signatures, left: Bool[Array, "B H U"], heads: Heads) -> Bool[Array, "B 1 W F"]:
        B, _, _, F = signatures.bits.shape
        W = signatures.width
        if self.anchor == "mean":
            # A majority by one, averaged over the heads, is far above 1e-3; an error of rounding is not.
            return heads.mean(signatures.excess(left)) > 1e-3
        if isinstance(self.anchor, int):
            anchor = jax.random.bernoulli(jax.random.key(self.anchor), shape=(W * F,))
        else:
            anchor = jnp.arange(W * F) % 2 == 1
        return jnp.broadcast_to(anchor.reshape(W, F), (B, 1, W, F))


def _of_every_head(bits: Bool[Array, "B H M G"], numbers: Int[Array, "B H M"], heads: Heads) -> Bool[Array, "B H M F"]:
    """Returns the bits of the layer's heads, G per kv head, for the token in each slot of these heads.

    A head gives 0 to a token that it does not hold.
    """
    given, where = heads.whole_layer(bits), heads.whole_layer(numbers)
    B, H, M, _ = bits.shape

    def slot_by_slot() -> Array:
        return jnp.broadcast_to(jnp.moveaxis(given, 1, 2)[:, None], (B, H, M, *given.shape[1::2]))

    def search() -> Array:
        order = jnp.argsort(where, axis=-1)
        held = jnp.take_along_axis(where, order, axis=-1)
        by_number = jnp.take_along_axis(given, order[..., None], axis=2)

        def look_up(tokens: Array, held: Array, given: Array) -> Array:
            at = jnp.searchsorted(held, tokens)  # past the end reads the last, which is another token
            return (held[at] == tokens)[:, None] & given[at]

        by_other = jax.vmap(look_up, in_axes=(None, 0, 0), out_axes=1)
        return jax.vmap(jax.vmap(by_other, in_axes=(0, None, None)))(numbers, held, by_number)

    aligned = jnp.all(where == where[:, :1])
    return jax.lax.cond(aligned, slot_by_slot, search).reshape(B, H, M, -1)


def _cuts(n: Int[Array, "B H"], parts: Int[Array, "B H"], most: int) -> Int[Array, "B H most"]:
    """Returns floor(i n / parts) for i = 0, 1, ..., without the product."""
    if most >= 2**16:
        raise ValueError(f"{most} representatives per head: expected fewer than {2**16}")
    quotient, rest = jnp.divmod(n[..., None], parts[..., None])
    i = jnp.arange(most)
    carry = i.astype(jnp.uint32) * rest.astype(jnp.uint32) // parts[..., None].astype(jnp.uint32)
    return i * quotient + carry.astype(jnp.int32)


def _k_means(bits: Bool[Array, "U F"], run: Int[Array, "U"], clusters: int) -> Int[Array, "U"]:
    """Clusters tokens or pages by Lloyd's algorithm, which starts from the runs; `clusters` stands for none."""
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
    (_, cluster), _ = jax.lax.scan(improve, start, length=ITERATIONS)
    return cluster


def _nearest(off: Array, group: Int[Array, "U"], numbers: Int[Array, "U"], groups: int) -> Bool[Array, "U"]:
    """Marks the member of each group with the smallest distance; of equal distances the earlier member."""
    nearest = off == jax.ops.segment_min(off, group, groups + 1)[group]
    earliest = jax.ops.segment_min(jnp.where(nearest, numbers, jnp.iinfo(jnp.int32).max), group, groups + 1)
    return nearest & (numbers == earliest[group]) & (group < groups)
