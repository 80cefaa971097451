"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118): retains the tokens that mattered to recent queries.

No code of its authors is known, so the constants are those of ports.

Differences from the paper:

- All layers have the same budget. The paper may give layers different budgets.
- The weights of a query group are averaged. The paper's models have one query head per kv head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Array, Float, UInt32

from kvjax.cache import Slots
from kvjax.policy import (
    Attended,
    LayerShape,
    Moment,
    Needs,
    Policy,
    Protect,
    Score,
    check_integer,
    check_number,
    share_of,
)

from .common import query_bits
from .common.budgets import budget_of
from .common.refusals import check_first_rotation
from .registry import preset

# A weight that is less below the mean counts as equal to it. Otherwise rounding decides about a first token, whose
# weight on itself is the mean.
CLOSE = 1e-6


@dataclass(frozen=True)
class Neglect(Score):
    """The negative number of the last `window` queries whose weight on a token was below the mean of all that they saw.

    A slot holds one bit for each query of the window, that of position p at bit p mod `window`. The bit says whether
    the weight that the slot received from this query, averaged over the query group, was below 1 / (the number of
    tokens that the query saw). Queries older than a token, or that attended before it was cached, do not count. On a
    mesh where devices hold the same kv head, they exchange the group's queries.

    Attributes:
        window: the number of queries. The state is ceil(window / 32) uint32 numbers per slot.
    """

    window: int

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)

    @property
    def needs(self) -> Needs:
        return replace(query_bits.NEEDS, marks=frozenset({"signed"}))

    def check(self, policy: Policy) -> None:
        check_first_rotation(policy)

    def init(self, shape: LayerShape) -> tuple[UInt32[Array, "B H window/32 S"], None]:
        return query_bits.no_bits(shape, self.window), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[UInt32[Array, "B H window/32 M"], None]:
        def low(relative: Array, seen: Array) -> Array:
            return seen & (relative < 1 - CLOSE)

        return query_bits.noted(entries.per_slot, self.window, entries, attended, low)[0], None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return -query_bits.number(entries.per_slot)


@preset
def scissorhands(budget: int = 1024, window: int = 400, recent: int = 10, drop: float = 0.5) -> Policy:
    """Evicts half of a full cache at once: the tokens on which most recent queries had weights below the mean.

        score[h, c] = -(number of the last `window` queries r with softmax(q_r . k)_c < 1 / n_r)

    n_r is the number of tokens that r saw. The weight of a query on c is averaged over the query group of h. Of equal
    scores the later token is evicted first. The `recent` newest tokens are never evicted.

    Args:
        budget: the most entries that a query sees, itself included. An integer >= 1.
        window: the number of queries whose weights count, the paper's w.
        recent: the number of most recent tokens, which are always retained, the paper's r.
        drop: the share of the budget that is evicted at once, the paper's m / B, above 0 and below 1. It is rounded
            down, to at least one entry.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than recent and what is evicted at once.
    """
    check_integer("budget", budget, least=1)
    check_number("drop", drop, "a share of the budget above 0 and below 1", lambda x: 0 < x < 1)
    return Policy(
        score=Neglect(window),
        budget=budget_of(budget),
        protect=Protect(recent=recent),
        every=max(1, share_of(drop, budget)),
    )
