"""RoCo, robust cache omission (Ren and Zhu, arXiv 2402.06262): evicts by mean attention, and exempts by its deviation.

Differences from the paper and its code (EasyKV):

- Mean and deviation are those of what the query group gives on average, from all queries that saw a token, itself
  included. The released code ignores the attention within the first part of a prompt unless `keep_attention` is set.
- A prompt is compressed once at its end. The released code evicts while it reads a prompt, in strides, or leaves the
  prompt as it is.
- The `exempt` largest deviations are a share of the budget, rounded down, and protected tokens count among them. The
  released code exempts int(`exempt` * b) + 1 of b + 1 entries.
- The budget counts the entries that a query sees, itself included: the paper's budget + 1 while decoding, because the
  paper evicts after the query has attended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import top_tokens
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_number, share_of

from .common import group_weights
from .common.budgets import budget_of
from .common.refusals import check_by_entry, check_first_rotation
from .registry import preset

ABOVE = 2.0  # beyond any mean of weights


class Moments(NamedTuple):
    """The sums of the weights that each entry received from all queries so far, and of their squares."""

    first: Float[Array, "B H S"]
    second: Float[Array, "B H S"]


@dataclass(frozen=True)
class RobustAttention(Score):
    """The mean weight from the queries that saw an entry; those with the largest standard deviation score above all.

    The weights of a query group are averaged first. While an allocated budget compares scores, no deviation counts. A
    prompt is scored in blocks of queries, because sums of squares of averages are no reduction of the kernels. On a
    mesh where devices hold the same kv head, they exchange the group's queries.

    Attributes:
        exempt: the share of the entries that a head retains which have the largest deviations, protected ones among
            them.
    """

    exempt: float

    def __post_init__(self) -> None:
        check_number("exempt", self.exempt, "a number in [0, 1)", lambda x: 0 <= x < 1)

    @property
    def needs(self) -> Needs:
        return replace(group_weights.NEEDS, by_count=True)

    def check(self, policy: Policy) -> None:
        check_first_rotation(policy)
        check_by_entry(policy, "scores entries with large deviations above all others")

    def init(self, shape: LayerShape) -> tuple[Moments, None]:
        none = shape.per_slot()
        return Moments(none, none), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Moments, None]:
        def add(moments: Moments, weights: Float[Array, "B H R M"], *_: Int[Array, "..."]) -> Moments:
            found = Moments(jnp.sum(weights, axis=2), jnp.sum(weights * weights, axis=2))
            return jax.tree.map(jnp.add, moments, found)

        return group_weights.fold_weights(add, entries.per_slot, entries, attended), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        mean, square = (x / moment.viewers(entries) for x in entries.per_slot)
        if moment.counts is None:
            return mean
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, 0))
        if moment.protected is not None:
            deviation = jnp.where(moment.protected, jnp.inf, deviation)
        deviation = jnp.where(entries.positions >= 0, deviation, -jnp.inf)
        number = share_of(self.exempt, moment.counts)
        largest = top_tokens(deviation, entries.positions, number, size=entries.slots)
        return jnp.where(mark(largest, entries.slots), ABOVE + mean, mean)


@preset
def roco(
    budget: int | float = 1024,
    exempt: float = 0.3,
    recent: int = 10,
    sinks: int = 0,
    every: int | None = 1,
) -> Policy:
    """Evicts the token with the least mean attention among those whose attention varies little.

    With a_r[c] the weight softmax(q_r . k)_c averaged over the query group, and n_c the number of queries that saw c,

        score[c] = MAS[c] = sum over r of a_r[c] / n_c
        std[c] = sqrt(sum over r of a_r[c]^2 / n_c - MAS[c]^2)

    The tokens with the largest std, `exempt` times the budget of them, are not evicted. The newest tokens count among
    them.

    Args:
        budget: the entries that a query sees, itself included: the paper's budget + 1 while decoding. An integer >= 1,
            or a float in (0, 1] for that share of each row's prompt.
        exempt: the share of the budget that the deviation exempts from eviction, the paper's r, in [0, 1) (released:
            0.3). It includes the protected tokens.
        recent: the number of most recent tokens, which are always retained (released: 10).
        sinks: the number of first tokens, which are always retained.
        every: the number of tokens that are evicted at a time while decoding; None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=RobustAttention(exempt),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
