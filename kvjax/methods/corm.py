"""CORM (Dai et al., arXiv 2404.15949): lets the recent queries vote for the tokens that they give more than the mean.

The defaults of `window` and `recent` were not compared with the paper's text.

Differences from the paper:

- The budget bounds the cache, because a compiled program has a fixed number of slots. A full head evicts the tokens
  with the fewest votes, and a token without votes stays while nothing needs its slot. The paper's cache has no bound:
  it retains the recent tokens and those with a vote, however many they are.
- A query group votes once, by its mean weight.
- The mean weight is that of the tokens which are cached when the query attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from kvjax.cache import Slots
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_integer

from .common import query_bits
from .common.budgets import budget_of
from .common.refusals import check_first_rotation
from .registry import preset


class Heard(NamedTuple):
    """One bit for each query of the window, which says that it voted, and the weight from the last query."""

    votes: UInt32[Array, "B H window/32 S"]
    weight: Float[Array, "B H S"]


@dataclass(frozen=True)
class Votes(Score):
    """The number of the last `window` queries whose weight on a token was at least the mean over all that they saw.

    Of tokens with equally many votes, that with the larger weight from the last query scores higher. The weight adds
    half of its fourth root, which keeps small weights apart in float32. Queries older than a token, or that attended
    before it was cached, do not count.

    Attributes:
        window: the number of queries. The state is ceil(window / 32) uint32 numbers and a float32 number per slot.
    """

    window: int

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)

    @property
    def needs(self) -> Needs:
        return query_bits.NEEDS

    def check(self, policy: Policy) -> None:
        check_first_rotation(policy)

    def init(self, shape: LayerShape) -> tuple[Heard, None]:
        weight = shape.per_slot()
        return Heard(query_bits.no_bits(shape, self.window), weight), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Heard, None]:
        def voted(relative: Array, seen: Array) -> Array:
            return seen & (relative >= 1)

        before: Heard = entries.per_slot
        votes, weight = query_bits.noted(before.votes, self.window, entries, attended, voted)
        asks = (attended.lengths > 0)[:, None, None]
        return Heard(votes, jnp.where(asks, weight, before.weight)), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        votes, weight = entries.per_slot
        return query_bits.number(votes) + jnp.sqrt(jnp.sqrt(weight)) / 2


@preset
def corm(budget: int | float = 1024, window: int = 256, recent: int = 256, every: int | None = 1) -> Policy:
    """Retains the tokens to which most of the recent queries gave at least the mean weight.

        votes[h, c] = number of the last `window` queries r with softmax(q_r . k)_c >= 1 / n_r

    n_r is the number of tokens that r sees. The weight on c is averaged over the query group; c is then no minor key of
    r. The tokens with the fewest votes are evicted, of equal ones that with the smallest weight from the last query,
    but never the `recent` newest.

    Args:
        budget: the most entries that a query sees, itself included. An integer >= 1, or a float in (0, 1] for that
            share of each row's prompt. The paper has no bound.
        window: the number of queries that vote, the paper's w.
        recent: the number of most recent tokens, which are always retained, the paper's r.
        every: the number of tokens that are evicted at a time while decoding; None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than recent + `every`.
    """
    return Policy(
        score=Votes(window),
        budget=budget_of(budget),
        protect=Protect(recent=recent),
        every=every,
    )
