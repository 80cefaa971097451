"""LagKV's score: how unlike the text that follows it a token is, by keys and values alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerCache
from kvjax.policy import Policy
from kvjax.protocols import Moment, Score, check_integer


@dataclass(frozen=True)
class LagDifference(Score):
    """The spread of a token's channels, each measured by the range that it has in the next `lag` tokens.

    What is cached after the sinks is cut into runs of `lag` consecutive tokens. With low and high the least and the
    largest that a channel is in the run that follows, a token's spread is the standard deviation over channels of
    (x - low) / (high - low); a softmax over the run makes it a share, and shares of key and value are averaged. A
    channel that does not vary there counts as 0. The last whole run and what comes after it have no run to be measured
    by: they score above all others, the later the higher. It communicates nothing.

    Attributes:
        sinks: the first tokens, which are not scored.
        lag: tokens to a run.
        cross: compare shares between runs; else ranks within each, so that all runs give up as many tokens.
    """

    sinks: int = 4
    lag: int = 128
    cross: bool = False

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("lag", self.lag, least=2)

    def check(self, policy: Policy) -> None:
        if policy.protect.sinks < self.sinks:
            raise ValueError(
                f"LagDifference does not score the first {self.sinks} tokens, so {policy.protect} must protect them; "
                f"accepted is sinks={self.sinks} or more"
            )

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        M, runs = entries.slots, -(-entries.slots // self.lag)
        scored = entries.positions >= self.sinks
        order = jnp.argsort(jnp.where(scored, entries.positions, jnp.iinfo(jnp.int32).max), axis=-1)
        place = jnp.argsort(order, axis=-1)
        newest = 1 + place.astype(jnp.float32)
        if runs < 2:
            return newest

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
