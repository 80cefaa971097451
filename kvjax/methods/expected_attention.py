"""Expected attention (Devoto et al., arXiv 2510.00636): retains entries by the attention expected of future queries.

Differences from kvpress, which has the authors' code:

- Statistics are kept per row, so that rows of different lengths do not mix, and a prompt may be read in chunks. They
  are the prompt's own, and the covariance has the denominator n.
- The rotation is averaged over the positions that follow each row's own end.
- The estimate has no attention sinks, which are no part of the paper: a model's sinks are left out of its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import capped, fold
from kvjax.pallas_kernels.arrays import by_member
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_integer, check_number

from .common.budgets import budget_of
from .common.in_turns import in_turns
from .common.mean_rotation import mean_rotation
from .common.refusals import check_own_positions, check_sinks
from .registry import preset


class QueryStatistics(NamedTuple):
    """The number and mean of each row's queries before rotation, and the sum of outer products about the mean."""

    number: Float[Array, "B Hq"]
    mean: Float[Array, "B Hq D"]
    scatter: Float[Array, "B Hq D D"]

    @classmethod
    def of(cls, queries: Float[Array, "B Hq W D"], counted: Float[Array, "B 1 W"]) -> QueryStatistics:
        """Returns the statistics of the queries that are counted, which have 1 in `counted`; the others have 0."""
        wide = queries.astype(jnp.float32)
        count = jnp.broadcast_to(jnp.sum(counted, axis=-1), wide.shape[:2])
        mean = jnp.sum(wide * counted[..., None], axis=2) / jnp.maximum(count, 1)[..., None]
        centred = (wide - mean[:, :, None]) * counted[..., None]
        return cls(count, mean, jnp.einsum("BHWD,BHWE->BHDE", centred, centred, precision="highest"))

    def joined(self, other: QueryStatistics) -> QueryStatistics:
        """Returns the statistics of both sets of queries (Chan et al.), without subtracting large numbers."""
        count = self.number + other.number
        share = other.number / jnp.maximum(count, 1)
        apart = other.mean - self.mean
        between = (self.number * share)[..., None, None] * apart[..., :, None] * apart[..., None, :]
        return QueryStatistics(count, self.mean + share[..., None] * apart, self.scatter + other.scatter + between)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """The expected attention of a Gaussian query at one of the next positions, times the norm of the value.

    The state is the mean and the covariance of queries before rotation, one matrix per query head. On a mesh where
    devices hold the same kv head these are gathered once per call.

    Attributes:
        sinks: the number of first tokens whose queries and keys do not count.
        future: the number of next positions over which the rotation is averaged.
        covariance: whether the covariance of queries counts, besides their mean.
        value_norm: whether attention is multiplied by the norm of the value.
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
        check_number("epsilon", self.epsilon, "a number >= 0", lambda x: x >= 0)

    @property
    def needs(self) -> Needs:
        return Needs(queries="unrotated", marks=frozenset({"weighs_values"}) if self.value_norm else frozenset())

    def check(self, policy: Policy) -> None:
        check_sinks(self.sinks, policy)
        check_own_positions(policy, "compares keys, rotated to their own positions, with queries at the next ones")

    def init(self, shape: LayerShape) -> tuple[None, QueryStatistics | None]:
        B, Hq, D = shape.batch, shape.heads, shape.head_dim
        return None, QueryStatistics(*(jnp.zeros(s, jnp.float32) for s in ((B, Hq), (B, Hq, D), (B, Hq, D, D))))

    def observe(self, entries: Slots, attended: Attended) -> tuple[None, QueryStatistics | None]:
        counted = (attended.positions >= self.sinks)[:, None].astype(jnp.float32)
        new = QueryStatistics.of(attended.queries, counted)
        return None, entries.per_row.joined(QueryStatistics(*map(attended.heads.whole_groups, new)))

    def query_statistics(
        self, entries: Slots, moment: Moment
    ) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq D D"]]:
        """Returns the mean and the covariance of queries before rotation, of all query heads of the kv heads."""
        statistics: QueryStatistics = entries.per_row
        return statistics.mean, statistics.scatter / jnp.maximum(statistics.number, 1)[..., None, None]

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        _, H, _, D = entries.keys.shape
        keys = entries.keys.astype(jnp.float32)
        turn = mean_rotation(moment, D, np.arange(self.future))
        mean, covariance = self.query_statistics(entries, moment)
        mean = turn(mean[:, :, None])[:, :, 0]
        covariance = turn(jnp.swapaxes(turn(covariance), -1, -2))  # R C R', because C is symmetric
        scored = entries.positions >= self.sinks

        def attention(head: tuple[Array, Array]) -> Float[Array, "B H M"]:
            """Computes one query head of every group, so that keys are not multiplied by all covariances at once."""
            mean, covariance = head
            softcap = moment.layer.softcap
            linear = moment.scale * jnp.einsum("BHMD,BHD->BHM", keys, mean, precision="highest")
            logits = capped(linear, softcap)
            if self.covariance:
                turned = jnp.einsum("BHMD,BHDE->BHME", keys, covariance, precision="highest")
                spread = moment.scale**2 / 2 * jnp.sum(turned * keys, axis=-1)
                # A soft cap is linear around the mean, with the slope 1 - tanh^2.
                logits += spread if softcap is None else spread * (1 - (logits / softcap) ** 2) ** 2
            if entries.bias is not None:
                logits += entries.bias
            weights = jax.nn.softmax(jnp.where(scored, logits, -jnp.inf), axis=-1)
            return jnp.where(scored, weights, 0)

        scores = fold(in_turns(attention, (by_member(mean, H), by_member(covariance, H))), "mean", axis=0)
        if self.value_norm:
            scores = (scores + self.epsilon) * jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)
        return scores


@preset
def expected_attention(
    budget: int | float = 1024,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
) -> Policy:
    """Compresses the prompt once, by the attention that is expected of queries that do not exist yet.

    Queries before rotation are modelled as Gaussian, with the mean m and the covariance C of the prompt's own queries.
    With R the mean RoPE matrix of the next `future` positions, the expected logit z of a future query on token c is

        z_c = scale * k_c . R m + scale^2 / 2 * k_c . R C R' k_c
        score[h, c] = (mean over the query group of softmax_c(z) + epsilon) * |v_c|

    The softmax is over all tokens but the sinks. The score needs no attention weights. The answer is added to the
    retained entries.

    Args:
        budget: the number of entries retained of the prompt, sinks included. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        sinks: the number of first tokens. They are always retained; neither their queries nor their keys count.
        future: the number of next positions over which rotations are averaged.
        covariance: whether the second term of the logit counts.
        value_norm: whether attention is multiplied by the norm of the value.
        epsilon: added to the attention first; kvpress's registry has 0.01 (its class, and this preset, 0). It has no
            effect without `value_norm`.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `sinks` + 1.
    """
    return Policy(
        score=ExpectedAttention(sinks, future, covariance, value_norm, epsilon),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
    )
