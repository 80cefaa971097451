"""LookaheadKV (Ahn et al., arXiv 2603.10899): learned tokens after the prompt attend as the answer will.

The method was written after the paper's description. It was not compared with the authors' code, and their trained
weights were not read. `kvjax train-gates` trains tokens and adapters.

Differences from the paper:

- The prompt is read first. The learned tokens then run over its complete cache, which gives the same attention: no
  token of the prompt sees them. The complete cache of the prompt exists until all layers have been scored.
- Adapters are added to the matrices, in the dtype of the model, for the time of this pass. Their scale is part of them.
- Experts of a mixture have no adapters.
- Scores are reduced over the query group as those of `snapkv`, and as many recent tokens are retained. They are not
  pooled, as training matches them entry by entry: `docs/results/demo_model.md` has the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction
from kvjax.policy import (
    Attended,
    Moment,
    Needs,
    Pass,
    Policy,
    Protect,
    Received,
    Texts,
    check_choice,
    check_integer,
    check_kind,
)

from .common.budgets import budget_of
from .common.pooling import Pooling
from .common.replayed import ReplayedScore
from .common.shares import UniformShares
from .registry import preset

GATES = "lookaheadkv"


@dataclass(frozen=True)
class LookaheadAttention(ReplayedScore):
    """The mean attention of an entry from learned tokens at the positions after the prompt.

    The tokens and adapters of the layers that run them lie beside the parameters (`kvjax.with_gates`). On a mesh where
    devices share a kv head its queries are gathered.

    Attributes:
        tokens: the number of learned tokens that run, the first of those that there are.
        group: the reduction over the query group.
        pooling: along the prompt, or None.

    Raises:
        ValueError: for a value that is not accepted.
    """

    tokens: int = 32
    group: Literal["mean", "max"] = "mean"
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        check_integer("tokens", self.tokens, least=1)
        check_choice("group", self.group, "mean", "max")
        if self.pooling is not None:
            check_kind("pooling", self.pooling, Pooling)

    @property
    def needs(self) -> Needs:
        received = Received(Reduction(rows="mean", group=self.group), calls="replays")
        return Needs(received=received, gates=GATES)

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        # A row without tokens in this call may have a prompt that ended in an earlier one.
        return [Pass.learned(GATES, self.tokens, jnp.maximum(lengths, 1))]

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        if attended.received is None:
            return entries.per_slot, None
        return jnp.where(entries.positions < 0, entries.per_slot, attended.received), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        scores = super().__call__(entries, moment)
        return scores if self.pooling is None else self.pooling(scores, entries.positions >= 0)


@preset
def lookaheadkv(
    budget: int | float = 1024,
    tokens: int = 32,
    recent: int = 32,
    kernel: int = 1,
    pool: Literal["max", "avg"] = "max",
    group: Literal["mean", "max"] = "mean",
) -> Policy:
    """Compresses the prompt by the attention of learned tokens that stand for its answer, at the cost of a short pass.

    After the prompt, T learned tokens t run at the positions N .. N + T - 1 through layers with adapters:

        score[h, c] = pool over c (reduce over the query group of h (mean over t of softmax(q_t . k)_c))

    The softmax is over the prompt and the learned tokens up to t, which leave no entries; the mean is over the tokens
    that see c, in a layer with a sliding window those within it. Training lets the scores of each query head follow the
    attention of the answer that the model itself would give. The answer is added to the retained entries.
    `adakv:base=lookaheadkv` lets the heads of a layer compete by these scores.

    Tokens and adapters are gates beside the parameters: `kvjax.with_gates(params, PATH)` reads those that `kvjax
    train-gates` writes.

    Args:
        budget: the number of entries retained of the prompt. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        tokens: the number of learned tokens that run (the paper's lookahead size), the first of those that there are.
        recent: the number of most recent tokens, which are always retained.
        kernel: the size of the pooling along the prompt, odd. 1 is none: training matches scores that are not pooled.
        pool: "max" or "avg".
        group: the reduction over the query heads of a kv head.

    Raises:
        ValueError: for a value that is not accepted. Parameters without these gates, or with fewer learned tokens, are
            refused when a prompt is read.
    """
    check_choice("pool", pool, "max", "avg")
    return Policy(
        score=LookaheadAttention(tokens, group, None if kernel == 1 else Pooling(pool, kernel)),
        budget=UniformShares(budget_of(budget)),
        protect=Protect(recent=recent),
    )
