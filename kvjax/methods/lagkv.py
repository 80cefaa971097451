"""LagKV (Liang et al., arXiv 2504.04704): retains the entries that are unlike the tokens that follow them.

Differences from the paper:

- All runs are scored after the prompt has been read, and the budget decides what is retained, as in kvpress. The paper
  compresses each run once, to a fixed ratio, as soon as the next run is complete.
- Runs are made of cached entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score, check_integer

from .common.budgets import budget_of
from .common.refusals import check_sinks
from .registry import preset


@dataclass(frozen=True)
class LagDifference(Score):
    """The deviation of a token's channels, each measured on the range that it has in the next `lag` tokens.

    The entries after the sinks are cut into runs of `lag` in order of position. With low and high the least and the
    largest value of a channel in the next run, the deviation of a token is the standard deviation over channels of
    (x - low) / (high - low). A softmax over the run makes it a share, and the shares of key and value are averaged. A
    channel that does not vary in the next run counts as 0.

    The last whole run and the entries after it have no next run. They score above all others, later entries higher. The
    score communicates nothing between devices.

    Attributes:
        sinks: the number of first tokens that are not scored.
        lag: the number of tokens in a run.
        cross: whether the score is the share, which is compared between runs. If not, it is the rank of the share
            within the run, so that all runs lose the same number of tokens.
    """

    sinks: int = 4
    lag: int = 128
    cross: bool = False

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("lag", self.lag, least=2)

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"ordinal"}))

    def check(self, policy: Policy) -> None:
        check_sinks(self.sinks, policy)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        M, runs = entries.slots, -(-entries.slots // self.lag)
        scored = entries.positions >= self.sinks
        order = jnp.argsort(jnp.where(scored, entries.positions, jnp.iinfo(jnp.int32).max), axis=-1)
        place = jnp.argsort(order, axis=-1)
        newest = 1 + place.astype(jnp.float32)

        def shares(x: Float[Array, "B H M D"]) -> Float[Array, "B H runs-1 lag"]:
            x = jnp.take_along_axis(x, order[..., None], axis=2).astype(jnp.float32)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, runs * self.lag - M), (0, 0)))
            x = x.reshape(*x.shape[:2], runs, self.lag, -1)
            following, x = x[:, :, 1:], x[:, :, :-1]
            low, high = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
            measured = jnp.where(high > low, (x - low) / jnp.where(high > low, high - low, 1), 0)
            return jax.nn.softmax(jnp.std(measured, axis=-1, ddof=1), axis=-1)

        score = (shares(entries.keys) + shares(entries.values)) / 2
        if not self.cross:
            score = 1 - (jnp.argsort(jnp.argsort(-score, axis=-1), axis=-1) + 1) / self.lag
        score = jnp.pad(score.reshape(*score.shape[:2], -1), ((0, 0), (0, 0), (0, self.lag)))
        measured = (jnp.sum(scored, axis=-1, keepdims=True) // self.lag - 1) * self.lag
        return jnp.where(place < measured, jnp.take_along_axis(score, place, axis=-1), newest)


@preset
def lagkv(
    budget: int | float = 1024, sinks: int = 4, lag: int = 128, cross: bool = False, every: int | None = None
) -> Policy:
    """Retains the tokens of each run of `lag` that differ most from the next run, without attention weights.

    With low and high of each channel over the next run, and x the key or the value of a token,

        deviation[c] = softmax over the run of std over channels of (x_c - low) / (high - low)
        score[h, c] = rank of c in its run by the mean of the deviations of its key and its value

    The last whole run and what follows it are retained before all others. A prompt of fewer than sinks + 2 lag tokens
    retains its most recent tokens.

    Args:
        budget: the number of entries retained of the prompt per kv head, sinks included. An integer >= 1, or a float
            in (0, 1] for that share of each row's prompt.
        sinks: the number of first tokens, which are always retained.
        lag: the number of tokens in a run, an integer >= 2.
        cross: compares deviations between runs instead of ranks, so that runs lose different numbers of tokens.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + `every`.
    """
    return Policy(
        score=LagDifference(sinks, lag, cross),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
        every=every,
    )
