"""How much each cached entry matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache
from kvjax.overwrite import change_block, set_entries
from kvjax.pallas_kernels import Asked, Reduction, compact, fold, window_scores
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, Received, Score, SharedBudget, check_integer


@dataclass(frozen=True)
class Recency(Score):
    """The later the better."""

    @property
    def slotwise(self) -> bool:
        return True

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.positions.astype(jnp.float32)


@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """Attention received from every query so far, prompt and answer: sum over rows, reduced over the query group."""

    group: Literal["mean", "sum", "max"] = "mean"

    def __post_init__(self) -> None:
        Reduction(group=self.group)  # which refuses an unknown one

    @property
    def received(self) -> Received:
        return Received(Reduction(rows="sum", group=self.group, first="group"))

    @property
    def slotwise(self) -> bool:
        return True

    def init_slots(self, shape: LayerShape, slots: int) -> Float[Array, "B H S"]:
        return jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Array, Any]:
        return entries.per_slot + attended.received, entries.per_row

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


@dataclass(frozen=True)
class LastAttention(Score):
    """Attention received from the last query, averaged over all query heads of the layer.

    All heads score alike, so they keep the same tokens, and in the same slots: the average is taken slot by slot. On a
    mesh that spreads kv heads it is a sum over devices at each step.
    """

    @property
    def received(self) -> Received:
        return Received(Reduction(rows="sum", group="mean"), last=1)

    def check(self, policy: Policy) -> None:
        if isinstance(policy.budget, SharedBudget) and policy.budget.groups is not None:
            raise ValueError(
                "LastAttention has all heads of a layer keep the same tokens, and "
                f"{type(policy.budget).__name__} gives them different numbers; they cannot be combined"
            )

    def init_slots(self, shape: LayerShape, slots: int) -> Float[Array, "B H S"]:
        return jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Array, None]:
        assert attended.received is not None
        mean = jnp.broadcast_to(attended.heads.mean(attended.received), entries.positions.shape)
        return jnp.where(attended.lengths[:, None, None] > 0, mean, entries.per_slot), None

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


@dataclass(frozen=True)
class Pool:
    """1-D pooling along the text with stride 1, centred, so that what stands beside an important token counts too.

    At the borders "avg" divides by `size` all the same, and "max" looks at what is there.
    """

    kind: Literal["avg", "max"] = "max"
    size: int = 7

    def __post_init__(self) -> None:
        odd = isinstance(self.size, int) and self.size >= 1 and self.size % 2 == 1
        if self.kind not in ("avg", "max") or not odd:
            raise ValueError(f"pooling {self.kind!r} of {self.size}: accepted are 'avg' and 'max' of an odd size >= 1")

    def __call__(self, scores: Float[Array, "B H M"], eligible: Bool[Array, "B H M"]) -> Float[Array, "B H M"]:
        """Pools the eligible entries, which are in order of position; gaps between them do not separate neighbours."""
        start, combine = (0.0, jax.lax.add) if self.kind == "avg" else (-jnp.inf, jax.lax.max)
        packed = compact(eligible, scores.shape[-1])
        together = jnp.where(packed >= 0, jnp.take_along_axis(scores, packed, axis=-1), start)
        side = self.size // 2
        pooled = jax.lax.reduce_window(
            together,
            jnp.float32(start),
            combine,
            window_dimensions=(1, 1, self.size),
            window_strides=(1, 1, 1),
            padding=((0, 0), (0, 0), (side, side)),
        )
        if self.kind == "avg":
            pooled = pooled / self.size
        return jnp.take_along_axis(pooled, jnp.maximum(jnp.cumsum(eligible, axis=-1) - 1, 0), axis=-1)


def check_window(window: int, policy: Policy) -> None:
    """Raises ValueError if a policy does not protect the window whose queries score the tokens before it."""
    if isinstance(policy.protect.recent, float) or policy.protect.recent < window:
        raise ValueError(
            f"{type(policy.score).__name__} scores what is older than its window of {window}, so {policy.protect} "
            f"must protect it; accepted is recent={window} or more"
        )


class QueryRing(NamedTuple):
    """Each row's last R queries, the one of position p at index p mod R; positions are the same for all heads."""

    queries: Float[Array, "B Hq R D"]
    lse: Float[Array, "B Hq R"]
    positions: Int[Array, "B H R"]

    @classmethod
    def empty(cls, shape: LayerShape, size: int) -> QueryRing:
        rows = (shape.batch, shape.heads, size)
        return cls(
            jnp.zeros((*rows, shape.head_dim), shape.dtype),
            jnp.zeros(rows, jnp.float32),
            jnp.full((shape.batch, shape.kv_heads, size), -1, jnp.int32),
        )

    def push(self, attended: Attended) -> QueryRing:
        """Takes in the last R of the queries that have just attended."""
        size = self.positions.shape[-1]
        queries, lse = (attended.heads.whole_groups(x[:, :, -size:]) for x in (attended.queries, attended.lse))
        positions = attended.positions[:, -size:]
        # A query that saw nothing counts for nothing. Said so that it depends on the attention, without which XLA does
        # not see that the ring is read before it is written, and copies it.
        queries = jnp.where(jnp.isneginf(lse)[..., None], 0, queries)
        index = jnp.where(positions >= 0, positions % size, size)
        positions = jnp.broadcast_to(positions[:, None], (*self.positions.shape[:2], positions.shape[1]))
        new = QueryRing(queries, lse, positions)
        return jax.tree.map(lambda x, new: set_entries(x, index, new), self, new)

    def block(self, number: Int[Array, "B"], size: int) -> QueryRing:
        """Each row's queries number * size .. (number + 1) * size - 1 of the ring."""

        def take(x: Array, axis: int) -> Array:
            blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
            at = number.reshape(-1, *(1,) * (blocks.ndim - 1))
            return jnp.squeeze(jnp.take_along_axis(blocks, at, axis), axis)

        return QueryRing(take(self.queries, 2), take(self.lse, 2), take(self.positions, 2))


@dataclass(frozen=True)
class WindowAttention(Score):
    """Attention received from the last `window` queries, older than which is all that it scores.

    The state is those queries with the log-sum-exp they attended with: exp(q . k - lse) is then exactly the weight each
    of them gave, for as long as keys do not change, and no weight needs to be kept.

    Attributes:
        reduction: over the window's queries and the query group.
        pool: pooling along the prompt.
        normalise: "full": the softmax over all that a query saw; "distant": over the entries older than the window.
        sum_logits: sum the logits of a group before the softmax, so that the group votes as one head.
        rescale: multiply what a query gave by the number of tokens before it.
    """

    window: int
    reduction: Reduction
    pool: Pool | None = None
    normalise: Literal["full", "distant"] = "full"
    sum_logits: bool = False
    rescale: bool = False

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)
        if self.normalise not in ("full", "distant"):
            raise ValueError(f"normalise={self.normalise!r}: accepted are 'full' and 'distant'")
        if self.sum_logits and self.normalise != "distant":
            raise ValueError(
                "summed logits have no log-sum-exp of their own; accepted with them is normalise='distant'"
            )
        if self.rescale and self.normalise != "full":
            raise ValueError(f"rescale=True with normalise={self.normalise!r}: accepted with it is 'full'")

    @property
    def stores_queries(self) -> bool:
        return True

    @property
    def slotwise(self) -> bool:
        return self.normalise == "full"

    def check(self, policy: Policy) -> None:
        check_window(self.window, policy)
        if self.pool is not None and policy.every is not None:
            raise ValueError(
                f"{self.pool} needs neighbouring tokens side by side, and every={policy.every} overwrites slots in any "
                "order; they cannot be combined"
            )

    def init_rows(self, shape: LayerShape) -> QueryRing:
        return QueryRing.empty(shape, self.window)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[None, QueryRing]:
        return None, entries.per_row.push(attended)

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        ring: QueryRing = entries.per_row
        queries = ring.queries
        if self.sum_logits:
            B, Hq, R, D = queries.shape
            queries = jnp.sum(queries.reshape(B, -1, Hq // entries.keys.shape[1], R, D), axis=2)
        distant = entries.positions < moment.next_position[:, None, None] - self.window
        distant = distant & (entries.positions >= 0)
        lse = ring.lse
        if self.rescale:
            lse = lse - jnp.log(jnp.maximum(ring.positions[:, :1], 1).astype(jnp.float32))
        scores = window_scores(
            queries,
            entries.keys,
            ring.positions[:, 0],
            jnp.where(distant, entries.positions, -1),
            lse=lse if self.normalise == "full" else None,
            scale=moment.scale,
            bias=entries.bias,
            window=moment.window,
            causal=False,
            reduction=self.reduction,
        )
        return scores if self.pool is None else self.pool(scores, distant)


class Folds(NamedTuple):
    """What each slot received from the window's queries.

    Attributes:
        blocks: from those of each block that is not leaving the window.
        leaving: from those of the one that is, where they are asked ahead.
    """

    blocks: Float[Array, "B H R/block S"]
    leaving: Float[Array, "B H S"] | None


@dataclass(frozen=True)
class FoldedWindow(Score):
    """The scores of WindowAttention at a part of its work: what a slot received is folded a block of queries at a time.

    Queries form blocks by position, `block` to each. A slot keeps one number for each block in the window: what it
    received from the block's queries so far, reduced. That is exact for all blocks but the one which is leaving the
    window, whose queries that are still in it are asked again, as WindowAttention asks all of them.

    Attributes:
        window: the number of queries, a multiple of `block`. R / block float32 numbers are kept a slot.
        block: queries to a block; 1 keeps every weight and asks no query again.
        reduction: over the group, then over the window's queries.
        ahead: ask at each step, while it attends and reads all keys, what the next one would ask again; what a slot
            received is one more number. It pays where each step evicts. Scores are the same.
    """

    window: int
    block: int
    reduction: Reduction
    ahead: bool = False

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)
        check_integer("block", self.block, least=1)
        if self.window % self.block:
            raise ValueError(f"block={self.block}: accepted is a divisor of the window, {self.window}")
        commute = (self.reduction.rows == "max") == (self.reduction.group == "max")
        if self.ahead and self.block == 1:
            raise ValueError("ahead=True with block=1, which asks no query again; accepted with it is ahead=False")
        if self.reduction.rows == "mean" or not (commute or self.reduction.first == "group"):
            raise ValueError(f"{self.reduction} of blocks: accepted are rows 'sum' and 'max' of a group reduced first")

    @property
    def received(self) -> Received:
        return Received(self.reduction, stepwise=True)

    @property
    def stores_queries(self) -> bool:
        return True

    @property
    def slotwise(self) -> bool:
        return True

    def check(self, policy: Policy) -> None:
        check_window(self.window, policy)

    @property
    def columns(self) -> int:
        """Blocks in the window."""
        return self.window // self.block

    def init_slots(self, shape: LayerShape, slots: int) -> Folds:
        def zeros(*inner: int) -> Array:
            return jnp.zeros((shape.batch, shape.kv_heads, *inner, slots), jnp.float32)

        return Folds(zeros(self.columns), zeros() if self.ahead else None)

    def init_rows(self, shape: LayerShape) -> QueryRing:
        return QueryRing.empty(shape, self.window)

    def asks(self, entries: LayerCache, positions: Int[Array, "B"]) -> Asked | None:
        return self._leaving(entries.per_row, positions) if self.ahead else None

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Folds, QueryRing]:
        ring: QueryRing = entries.per_row.push(attended)
        if attended.received is None:
            return self._fold_all(entries, attended, ring), ring
        state, position = entries.per_slot, attended.positions[:, 0]
        incoming, received = position >= 0, attended.received[:, :, None]
        begins = (position % self.block == 0)[:, None, None, None]
        own = jnp.where(incoming, position // self.block % self.columns, self.columns)
        blocks = change_block(state.blocks, own, lambda x: self._join(jnp.where(begins, 0.0, x), received))
        leaving = state.leaving
        if leaving is not None:
            given = attended.asked
            if given is None:
                given = self._ask(ring, entries, position, attended)
            leaving = jnp.where(incoming[:, None, None], given, leaving)
        return Folds(blocks, leaving), ring

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        state: Folds = entries.per_slot
        scores = fold(state.blocks, self.reduction.rows, axis=2)
        if self.block == 1:
            return scores
        leaving, newest = state.leaving, moment.next_position - 1
        if leaving is None:
            leaving = self._ask(entries.per_row, entries, newest, moment)
        return self._join(scores, leaving)

    def _leaving(self, ring: QueryRing, newest: Int[Array, "B"]) -> Asked:
        """Those of the block which is leaving that are in the window whose newest query, pushed or not, is there."""
        block = ring.block(newest // self.block % self.columns, self.block)
        positions, newest = block.positions[:, 0], newest[:, None]
        still = (positions > newest - self.window) & (positions < newest - newest % self.block)
        return Asked(block.queries, block.lse, jnp.where(still, positions, -1), self.reduction)

    def _ask(
        self, ring: QueryRing, entries: LayerCache, newest: Int[Array, "B"], given: Attended | Moment
    ) -> Float[Array, "B H M"]:
        """What the leaving ones give to the entries older than the window, which are older than all of them."""
        distant = entries.positions <= newest[:, None, None] - self.window
        return self._leaving(ring, newest).scores(
            window_scores,
            entries.keys,
            jnp.where(distant, entries.positions, -1),
            scale=given.scale,
            bias=entries.bias,
            window=given.window,
            causal=False,
        )

    def _fold_all(self, entries: LayerCache, attended: Attended, ring: QueryRing) -> Folds:
        """The folds of all blocks anew, from their queries: many of these have just attended."""
        newest = jnp.max(ring.positions[:, 0], axis=1)
        begun = newest - newest % self.block

        def fold_one(column: Array) -> Float[Array, "B H M"]:
            block = ring.block(jnp.broadcast_to(column, newest.shape), self.block)
            positions = block.positions[:, 0]
            leaves = (column == newest // self.block % self.columns)[:, None] & (positions < begun[:, None])
            return window_scores(
                block.queries,
                entries.keys,
                jnp.where(leaves, -1, positions),
                entries.positions,
                lse=block.lse,
                scale=attended.scale,
                bias=entries.bias,
                window=attended.window,
                reduction=self.reduction,
            )

        blocks = jnp.moveaxis(jax.lax.map(fold_one, jnp.arange(self.columns)), 0, 2)
        return Folds(blocks, self._ask(ring, entries, newest, attended) if self.ahead else None)

    def _join(self, one: Array, other: Array) -> Array:
        return jnp.maximum(one, other) if self.reduction.rows == "max" else one + other
