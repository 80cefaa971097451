"""What queries to come may be expected to attend to, from the mean and the covariance of those so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerCache
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, Score, check_integer


class QueryStatistics(NamedTuple):
    """Of each row's queries before rotation: how many, their mean, and the sum of outer products about it."""

    number: Float[Array, "B Hq"]
    mean: Float[Array, "B Hq D"]
    scatter: Float[Array, "B Hq D D"]

    @classmethod
    def of(cls, queries: Float[Array, "B Hq W D"], counted: Float[Array, "B 1 W"]) -> QueryStatistics:
        """Of those that are counted, which have 1 there and not 0."""
        wide = queries.astype(jnp.float32)
        count = jnp.broadcast_to(jnp.sum(counted, axis=-1), wide.shape[:2])
        mean = jnp.sum(wide * counted[..., None], axis=2) / jnp.maximum(count, 1)[..., None]
        centred = (wide - mean[:, :, None]) * counted[..., None]
        return cls(count, mean, jnp.einsum("BHWD,BHWE->BHDE", centred, centred, precision="highest"))

    def joined(self, other: QueryStatistics) -> QueryStatistics:
        """Of the queries of both (Chan et al.): nothing large is subtracted from something large."""
        count = self.number + other.number
        share = other.number / jnp.maximum(count, 1)
        apart = other.mean - self.mean
        between = (self.number * share)[..., None, None] * apart[..., :, None] * apart[..., None, :]
        return QueryStatistics(count, self.mean + share[..., None] * apart, self.scatter + other.scatter + between)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """The attention that a Gaussian query at one of the next positions would give, times the norm of the value.

    Of queries before rotation the state is the mean and the covariance, a matrix a query head. On a mesh where devices
    share a kv head these are gathered once a call.

    Attributes:
        sinks: the first tokens, of which neither queries nor keys count.
        future: the rotation is averaged over so many positions to come.
        covariance: whether queries spread about their mean.
        value_norm: whether attention is weighed with the value's norm.
        epsilon: added to the attention before that.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("future", self.future, least=1)
        if isinstance(self.epsilon, str | bool) or not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r}: accepted is a number >= 0")

    def check(self, policy: Policy) -> None:
        if policy.protect.sinks < self.sinks:
            raise ValueError(
                f"ExpectedAttention does not score the first {self.sinks} tokens, so {policy.protect} must protect "
                f"them; accepted is sinks={self.sinks} or more"
            )
        if policy.positions == "in_cache":
            raise ValueError(
                "ExpectedAttention compares keys with queries at positions to come, so keys must be rotated to their "
                "own; it cannot be combined with positions='in_cache'"
            )

    def init_rows(self, shape: LayerShape) -> QueryStatistics:
        B, Hq, D = shape.batch, shape.heads, shape.head_dim
        return QueryStatistics(*(jnp.zeros(s, jnp.float32) for s in ((B, Hq), (B, Hq, D), (B, Hq, D, D))))

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[None, QueryStatistics]:
        counted = (attended.positions >= self.sinks)[:, None].astype(jnp.float32)
        new = QueryStatistics.of(attended.unrotated, counted)
        return None, entries.per_row.joined(QueryStatistics(*map(attended.heads.whole_groups, new)))

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        statistics: QueryStatistics = entries.per_row
        B, H, M, D = entries.keys.shape
        keys = entries.keys.astype(jnp.float32)
        turn = self._mean_rotation(moment, D)
        mean = turn(statistics.mean[:, :, None])[:, :, 0]
        covariance = statistics.scatter / jnp.maximum(statistics.number, 1)[..., None, None]
        covariance = turn(jnp.swapaxes(turn(covariance), -1, -2))  # R C R', C being symmetric
        scored = entries.positions >= self.sinks

        def attention(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
            """One query head of every group, lest keys are multiplied by all their covariances at once."""
            mean, covariance = head
            logits = moment.scale * jnp.einsum("BHMD,BHD->BHM", keys, mean, precision="highest")
            if self.covariance:
                turned = jnp.einsum("BHMD,BHDE->BHME", keys, covariance, precision="highest")
                logits += moment.scale**2 / 2 * jnp.sum(turned * keys, axis=-1)
            if entries.bias is not None:
                logits += entries.bias
            weights = jax.nn.softmax(jnp.where(scored, logits, -jnp.inf), axis=-1)
            return total + jnp.where(scored, weights, 0), None

        def by_group(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(B, H, -1, *x.shape[2:]), 2, 0)

        scores, _ = jax.lax.scan(attention, jnp.zeros((B, H, M)), (by_group(mean), by_group(covariance)))
        scores /= mean.shape[1] // H
        if self.value_norm:
            scores = (scores + self.epsilon) * jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)
        return scores

    def _mean_rotation(self, moment: Moment, dim: int) -> Callable[[Float[Array, "B H N D"]], Float[Array, "B H N D"]]:
        """RoPE in the mean over the positions that come next in each row: linear, but no rotation any more."""
        rope = moment.layer.rope
        frequencies = jnp.asarray(rope.frequencies(dim) if moment.rope is None else moment.rope)
        positions = moment.next_position[:, None] + jnp.arange(self.future)
        angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, -2)
        cos, sin = (rope.attention_factor * jnp.mean(f(angles), axis=1)[:, None, None] for f in (jnp.cos, jnp.sin))
        half = frequencies.shape[-1]

        def turn(x: Float[Array, "B H N D"]) -> Float[Array, "B H N D"]:
            first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

        return turn
