"""MorphKV (Ghadia et al., ICML 2025, arXiv 2503.00979): decodes long answers in a cache of constant size.

Differences from the paper and its code:

- Weights are those of the softmax over everything that a query saw, summed over the query group, then fused over the
  window (Algorithm 1). The released code normalises weights over the distant entries alone (`normalise="distant"`), and
  takes the maximum over a query group (Mistral, Qwen, Phi) or one softmax of the group's summed logits (Llama).
- The paper stores the attention rows of the window, R numbers per slot and query head. Here the state is the last R
  queries with the log-sum-exp of their logits, and one number per slot and block of queries. exp(q_r . k_c - lse_r) is
  exactly the weight that the paper stores, because keys do not change. Weights are computed again only for the block
  that is leaving the window; with every=1 this happens in the pass over keys in which the previous step attends.
  `block=1` stores every weight, as the paper does.
- The budget counts the entries that a query sees, itself included: C + R of the paper's Figure 5. The released code
  holds C + R + 1.
- In the released Llama code, columns and slots of the profile diverge at the second eviction, because keys are pruned
  by another mask. kvjax does not reproduce this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Asked, Reduction, change_block, fold, mapped, window_scores
from kvjax.policy import (
    Attended,
    Budget,
    LayerShape,
    Moment,
    Needs,
    Policy,
    Protect,
    Received,
    Score,
    check_choice,
    check_integer,
    check_kind,
)

from .common.budgets import DenseLayers, budget_of
from .common.refusals import check_window
from .common.window_attention import QueryRing, WindowAttention
from .registry import preset


class Folds(NamedTuple):
    """The attention that each slot received from the window's queries.

    Attributes:
        blocks: from the queries of each block, except the block that is leaving the window.
        leaving: from the queries of that block that are still in the window; None unless `FoldedWindow.ahead`.
    """

    blocks: Float[Array, "B H blocks S"]
    leaving: Float[Array, "B H S"] | None


@dataclass(frozen=True)
class FoldedWindow(Score):
    """The scores of WindowAttention at a fraction of its work: weights are folded one block of queries at a time.

    Queries form blocks by position, `block` queries to each. A slot holds one number per block in the window: the
    weights that it received from the block's queries so far, reduced. That is exact for all blocks but the one that is
    leaving the window. The queries of this block that are still in the window are scored again, as WindowAttention
    scores all queries.

    Attributes:
        window: the number of queries R, a multiple of `block`. The state is R / block float32 numbers per slot.
        block: the number of queries per block; 1 stores every weight and scores no query again.
        reduction: over the group, then over the window's queries.
        ahead: whether each step scores, in the pass over keys in which it attends, what the next step would score
            again. It adds one number per slot and saves time if each step evicts. Scores are the same.
    """

    window: int
    block: int
    reduction: Reduction
    ahead: bool

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)
        check_integer("block", self.block, least=1)
        if self.window % self.block:
            raise ValueError(f"block={self.block}: expected a divisor of the window, {self.window}")
        check_kind("reduction", self.reduction, Reduction)
        commute = (self.reduction.rows == "max") == (self.reduction.group == "max")
        if self.ahead and self.block == 1:
            raise ValueError("ahead=True with block=1: expected ahead=False, since no query is scored again")
        if self.reduction.rows == "mean" or not (commute or self.reduction.first == "group"):
            raise ValueError(f"reduction={self.reduction}: expected rows 'sum' or 'max' of a group reduced first")

    @property
    def needs(self) -> Needs:
        received = Received(self.reduction, calls="steps")
        return Needs(received=received, queries="rotated", keeps_queries=True, slotwise=True)

    def check(self, policy: Policy) -> None:
        check_window(self.window, policy)

    @property
    def columns(self) -> int:
        """The number of blocks in the window."""
        return self.window // self.block

    def init(self, shape: LayerShape) -> tuple[Folds, QueryRing]:
        folds = Folds(shape.per_slot(self.columns), shape.per_slot() if self.ahead else None)
        return folds, QueryRing.empty(shape, self.window)

    def asks(self, per_row: QueryRing, positions: Int[Array, "B"]) -> Asked | None:
        return self._leaving(per_row, positions) if self.ahead else None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Folds, QueryRing]:
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

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        state: Folds = entries.per_slot
        scores = fold(state.blocks, self.reduction.rows, axis=2)
        if self.block == 1:
            return scores
        leaving, newest = state.leaving, moment.next_position - 1
        if leaving is None:
            leaving = self._ask(entries.per_row, entries, newest, moment)
        return self._join(scores, leaving)

    def _leaving(self, ring: QueryRing, newest: Int[Array, "B"]) -> Asked:
        """Returns the queries of the oldest block that are still inside the window ending at `newest`."""
        block = ring.block(newest // self.block % self.columns, self.block)
        positions, newest = block.positions[:, 0], newest[:, None]
        still = (positions > newest - self.window) & (positions < newest - newest % self.block)
        return Asked(block.queries, block.lse, jnp.where(still, positions, -1), self.reduction)

    def _ask(
        self, ring: QueryRing, entries: Slots, newest: Int[Array, "B"], given: Attended | Moment
    ) -> Float[Array, "B H M"]:
        """Returns the weights of the leaving queries on the entries older than the window, which all of them see."""
        distant = entries.positions <= newest[:, None, None] - self.window
        return self._leaving(ring, newest).scores(
            window_scores,
            entries.keys,
            jnp.where(distant, entries.positions, -1),
            bias=entries.bias,
            **given.layer.logits,
            causal=False,
        )

    def _fold_all(self, entries: Slots, attended: Attended, ring: QueryRing) -> Folds:
        """Returns the folds of all blocks, computed from their queries, after several queries have attended at once."""
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
                bias=entries.bias,
                **attended.layer.logits,
                reduction=self.reduction,
            )

        blocks = jnp.moveaxis(mapped(fold_one, jnp.arange(self.columns)), 0, 2)
        return Folds(blocks, self._ask(ring, entries, newest, attended) if self.ahead else None)

    def _join(self, one: Array, other: Array) -> Array:
        return jnp.maximum(one, other) if self.reduction.rows == "max" else one + other


@preset
def morphkv(
    budget: int | float = 2048,
    window: int = 32,
    fusion: Literal["sum", "max"] = "sum",
    every: int | None = 1,
    dense_layers: int = 0,
    normalise: Literal["full", "distant"] = "full",
    group: Literal["sum", "max", "logits"] = "sum",
    block: int | None = None,
) -> Policy:
    """Retains the `window` newest tokens and the distant tokens that receive the most attention from these.

        F[h, c] = fuse over the last R queries r of (sum over the query group of h of softmax(q_r . k)_c)

    At every step the distant entry with the smallest F makes room for the incoming token (Algorithm 1, equations 4 to
    7). `fuse` is the sum or the maximum.

    Variants, as text:

    - `morphkv:dense_layers=3` retains everything in the first layers.
    - `morphkv:normalise=distant,group=max` is MorphKV as released for Mistral, Qwen and Phi, `group=logits` for Llama.

    Args:
        budget: the entries that a query sees, itself included: C + R of the paper's Figure 5. An integer >= 1, or a
            float in (0, 1] for that share of each row's prompt.
        window: R, the number of newest tokens, which are always retained and whose queries score the others.
        fusion: over the window: "sum" (equation 5) or "max" (equation 6).
        every: the number of entries that are evicted at a time (A.5); the occupancy then moves between the budget and
            `every` - 1 below it. None compresses the prompt only.
        dense_layers: the number of first layers that retain everything (A.6, "layer-aware": 3).
        normalise: "full" is the paper's softmax over all entries that a query saw; "distant" is the released code's,
            over the distant entries alone.
        group: over the query group: "sum" of weights is the paper's. The released code has, both with "distant", the
            "max" of weights (Mistral, Qwen, Phi) and one softmax of the summed "logits" (Llama).
        block: the number of queries whose weights are folded into one number per slot, a divisor of the window. The
            default is the smallest with at most 8 numbers per slot. 1 stores every weight, R numbers per slot, as the
            paper does. Scores are the same for all.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + `every`.
    """
    check_choice("group", group, "sum", "max", "logits")
    check_choice("fusion", fusion, "sum", "max")
    check_integer("window", window, least=1)
    if normalise == "full" and group == "logits":
        raise ValueError(
            "normalise='full' with group='logits': expected normalise='distant', since summed logits have no "
            "log-sum-exp of their own"
        )
    reduction = Reduction(rows=fusion, group="max" if group == "max" else "sum", first="group")
    score: Score
    if normalise == "full":
        smallest = next(n for n in range(1, window + 1) if window % n == 0 and window <= 8 * n)
        size = smallest if block is None else block
        score = FoldedWindow(window, size, reduction, ahead=every == 1 and size != 1)
    elif block is None:
        score = WindowAttention(window, reduction, normalise=normalise, sum_logits=group == "logits")
    else:
        raise ValueError(
            f"block={block} with normalise={normalise!r}, group={group!r}: expected None, since folded weights cannot "
            "be normalised anew"
        )
    entries: Budget = budget_of(budget)
    return Policy(
        score=score,
        budget=DenseLayers(entries, dense_layers) if dense_layers else entries,
        protect=Protect(recent=window),
        every=every,
    )
