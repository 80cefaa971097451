"""Observed attention (kvpress; no paper of its own): retains the tokens with the largest mean attention.

It is H2O's score per query, which does not favour old tokens.

Differences from kvpress's ObservedAttentionPress:

- Attention is computed without storing the weights of all queries.
- It may also evict while decoding (`every`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect

from .common.accumulated import AccumulatedAttention
from .common.budgets import budget_of
from .registry import preset


@dataclass(frozen=True)
class ObservedAttention(AccumulatedAttention):
    """The mean over all queries that saw an entry of the attention that it received from them.

    These are the queries from its own position on, in a layer with a sliding window those within the window.
    """

    @property
    def needs(self) -> Needs:
        return replace(super().needs, marks=frozenset())

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot / moment.viewers(entries)


@preset
def observed_attention(
    budget: int | float = 1024,
    group: Literal["mean", "sum", "max"] = "mean",
    sinks: int = 0,
    recent: int = 0,
    every: int | None = None,
) -> Policy:
    """Retains the tokens with the largest mean attention from the queries that saw them.

        score[h, c] = mean over the queries r >= c of softmax(q_r . k)_c

    The mean is reduced over the query group of h.

    Args:
        budget: the number of entries retained of the prompt. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        group: the reduction over the query heads of a kv head.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=ObservedAttention(group),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
