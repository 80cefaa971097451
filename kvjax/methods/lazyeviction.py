"""LazyEviction (Zhang et al., arXiv 2506.15969): evicts tokens to which attention has not returned in their interval.

It follows the released code; its formula and constants were not compared with the paper's text.

Differences from the released code:

- A query group has one history, that of its mean weight. The released code stores entries, and their histories, per
  query head.
- The prompt is compressed at its end if it is beyond the budget, and all of its queries are observed. The released code
  evicts nothing before `window` tokens were decoded, and observes their queries only.
- A head evicts when it is full. The released code evicts at multiples of `window` decoded tokens, never before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_integer, check_number

from .common import group_weights
from .common.budgets import budget_of
from .common.refusals import check_first_rotation
from .registry import preset


class Recurrence(NamedTuple):
    """The time of a token's last activity, 0 at the position before its own, and its longest interval, 0 if none."""

    last: Int[Array, "B H S"]
    longest: Int[Array, "B H S"]


@dataclass(frozen=True)
class RecurrenceInterval(Score):
    """Scores how likely attention returns to a token, by the time since it was active and its longest interval.

    With t the position of the last query, L that of the last query whose weight on it was `alpha` or more, and M the
    longest interval between two such queries (the first interval begins one position before the token),

        score = 2 / (1 + exp(1 + (t - L) / M)) + 2 / (1 + exp(M - 1))

    A token that was never active scores 2 / (1 + e) at t = L, and 0 later. The state is two int32 numbers per slot.

    Attributes:
        alpha: the weight, averaged over the query group, from which on a token is active, above 0 and at most 1.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, "a weight above 0 and at most 1", lambda x: 0 < x <= 1)

    @property
    def needs(self) -> Needs:
        return replace(group_weights.NEEDS, slotwise=True)

    def check(self, policy: Policy) -> None:
        check_first_rotation(policy)

    def init(self, shape: LayerShape) -> tuple[Recurrence, None]:
        never = shape.per_slot(dtype=jnp.int32)
        return Recurrence(never, never), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Recurrence, None]:
        def track(
            past: Recurrence,
            weights: Float[Array, "B H R M"],
            t: Int[Array, "B R"],
            held: Int[Array, "B H M"],
        ) -> Recurrence:
            def ask(r: Array, past: Recurrence) -> Recurrence:
                at = t[:, r][:, None, None]
                active = (weights[:, :, r] >= self.alpha) & (held >= 0) & (at >= 0)
                time = at - held + 1
                interval = jnp.where(active, time - past.last, 0)
                return Recurrence(jnp.where(active, time, past.last), jnp.maximum(past.longest, interval))

            return jax.lax.fori_loop(0, t.shape[1], ask, past, unroll=8)

        return group_weights.fold_weights(track, entries.per_slot, entries, attended), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        last, longest = (x.astype(jnp.float32) for x in entries.per_slot)
        inactive = (moment.next_position[:, None, None] - entries.positions).astype(jnp.float32) - last
        overdue = jnp.where(longest > 0, inactive / jnp.maximum(longest, 1), jnp.where(inactive > 0, jnp.inf, 0))
        often = jnp.where(longest > 0, jax.nn.sigmoid(1 - longest), 0)
        return 2 * jax.nn.sigmoid(-1 - overdue) + 2 * often


@preset
def lazyeviction(budget: int | float = 1024, window: int = 175, alpha: float = 1e-4) -> Policy:
    """Evicts `window` tokens at a time: those to which attention has not returned for longer than it ever took before.

    A query is active on a token if its weight is `alpha` or more. With L the position of the last active query, M the
    maximum recurrence interval between active queries and t the newest position,

        score[h, c] = 2 / (1 + exp(1 + (t - L) / M)) + 2 / (1 + exp(M - 1))

    Tokens with short intervals score higher.

    Args:
        budget: the most entries that a query sees, itself and the observation window included: the paper's budget + W.
            An integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        window: the number of newest tokens, which are always retained, and of tokens that are evicted at a time: the
            paper's W (released: 101 for GSM8K, 175 for MATH, 363 for AIME).
        alpha: the weight, averaged over the query group, from which on a query is active (released: 0.0001).

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than 2 * `window`.
    """
    check_integer("window", window, least=1)
    return Policy(
        score=RecurrenceInterval(alpha),
        budget=budget_of(budget),
        protect=Protect(recent=window),
        every=window,
    )
