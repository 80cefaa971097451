"""The attention that entries receive from a window of the most recent queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction, set_entries, window_scores
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Score, check_choice, check_integer, check_kind

from .pooling import Pooling
from .refusals import check_in_order, check_window


class QueryRing(NamedTuple):
    """The last W queries of each row, that of position p at index p mod W. Positions are the same for all heads."""

    queries: Float[Array, "B Hq W D"]
    lse: Float[Array, "B Hq W"]
    positions: Int[Array, "B H W"]

    @classmethod
    def empty(cls, shape: LayerShape, size: int) -> QueryRing:
        """Returns a ring of `size` queries that holds none."""
        rows = (shape.batch, shape.heads, size)
        return cls(
            jnp.zeros((*rows, shape.head_dim), shape.dtype),
            jnp.zeros(rows, jnp.float32),
            jnp.full((shape.batch, shape.kv_heads, size), -1, jnp.int32),
        )

    def push(self, attended: Attended) -> QueryRing:
        """Returns the ring with the last W of the queries that have just attended."""
        size = self.positions.shape[-1]
        queries, lse = (attended.heads.whole_groups(x[:, :, -size:]) for x in (attended.queries, attended.lse))
        positions = attended.positions[:, -size:]
        # A query that saw no entry is zeroed. The zeroing also makes the update depend on the attention; without that
        # dependence XLA does not see that the ring is read before it is written, and copies it.
        queries = jnp.where(jnp.isneginf(lse)[..., None], 0, queries)
        index = jnp.where(positions >= 0, positions % size, size)
        positions = jnp.broadcast_to(positions[:, None], (*self.positions.shape[:2], positions.shape[1]))
        new = QueryRing(queries, lse, positions)
        return jax.tree.map(lambda x, new: set_entries(x, index, new), self, new)

    def block(self, number: Int[Array, "B"], size: int) -> QueryRing:
        """Returns the queries number * size .. (number + 1) * size - 1 of each row's ring."""

        def take(x: Array, axis: int) -> Array:
            blocks = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
            at = number.reshape(-1, *(1,) * (blocks.ndim - 1))
            return jnp.squeeze(jnp.take_along_axis(blocks, at, axis), axis)

        return QueryRing(take(self.queries, 2), take(self.lse, 2), take(self.positions, 2))


@dataclass(frozen=True)
class QueryWindow(Score):
    """The base of scores from the last queries. The state is these queries.

    Attributes:
        window: the number of queries.
    """

    window: int

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", keeps_queries=True, marks=frozenset({"signed"}))

    def check(self, policy: Policy) -> None:
        check_window(self.window, policy)

    def init(self, shape: LayerShape) -> tuple[Any, Any]:
        return None, QueryRing.empty(shape, self.window)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, Any]:
        return None, entries.per_row.push(attended)

    def distant(self, entries: Slots, moment: Moment) -> Bool[Array, "B H M"]:
        """Returns which entries are older than the window."""
        return (entries.positions >= 0) & (entries.positions < moment.next_position[:, None, None] - self.window)


@dataclass(frozen=True)
class WindowAttention(QueryWindow):
    """The attention that entries older than the last `window` queries receive from these queries.

    The state is these queries with the log-sum-exp of their logits when they attended. The weight of query r on
    key c is then exp(scale * q_r . k_c - lse_r), exactly, as long as keys do not change; no weight is stored.

    Attributes:
        window: the number of queries.
        reduction: over the window's queries and the query group.
        pooling: along the prompt, or None.
        normalise: "full" is the softmax over all entries that a query saw; "distant" is the softmax over the entries
            older than the window.
        sum_logits: sums the logits of a query group before the softmax, so that the group votes as one head.
        rescale: multiplies the weights of a query by the number of tokens before it.
    """

    reduction: Reduction
    pooling: Pooling | None = None
    normalise: Literal["full", "distant"] = "full"
    sum_logits: bool = False
    rescale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("reduction", self.reduction, Reduction)
        if self.pooling is not None:
            check_kind("pooling", self.pooling, Pooling)
        check_choice("normalise", self.normalise, "full", "distant")
        if self.sum_logits and self.normalise != "distant":
            raise ValueError(
                f"normalise={self.normalise!r} with sum_logits=True: expected 'distant', since summed logits have no "
                "log-sum-exp of their own"
            )
        if self.rescale and self.normalise != "full":
            raise ValueError(f"normalise={self.normalise!r} with rescale=True: expected 'full'")

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", keeps_queries=True, slotwise=self.normalise == "full")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if self.pooling is not None:
            check_in_order(policy, self.pooling)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        ring: QueryRing = entries.per_row
        queries = ring.queries
        if self.sum_logits:
            B, Hq, W, D = queries.shape
            queries = jnp.sum(queries.reshape(B, -1, Hq // entries.keys.shape[1], W, D), axis=2)
        distant = self.distant(entries, moment)
        lse = ring.lse
        if self.rescale:
            lse = lse - jnp.log(jnp.maximum(ring.positions[:, :1], 1).astype(jnp.float32))
        scores = window_scores(
            queries,
            entries.keys,
            ring.positions[:, 0],
            jnp.where(distant, entries.positions, -1),
            lse=lse if self.normalise == "full" else None,
            bias=entries.bias,
            **moment.layer.logits,
            causal=False,
            reduction=self.reduction,
        )
        return scores if self.pooling is None else self.pooling(scores, distant)
