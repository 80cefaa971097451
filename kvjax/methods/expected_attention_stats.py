"""Expected attention (Devoto et al., arXiv 2510.00636) with saved statistics: scores by the queries of other texts.

Differences from kvpress's ExpectedAttentionStatsPress:

- `every=` evicts while decoding, which kvpress does not.
- As in kvpress, the queries are those of other texts, and the covariance has the denominator n - 1.
  `expected_attention` measures the prompt's own, with the denominator n.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect

from .common.budgets import budget_of
from .expected_attention import ExpectedAttention
from .registry import preset


@dataclass(frozen=True)
class SavedExpectedAttention(ExpectedAttention):
    """`ExpectedAttention` without state: mean and covariance of queries are statistics (`kvjax.with_statistics`)."""

    @property
    def needs(self) -> Needs:
        marks = frozenset({"weighs_values"}) if self.value_norm else frozenset[str]()
        return Needs(marks=marks, statistics=("query_mean", "query_cov"))

    def init(self, shape: LayerShape) -> tuple[None, None]:
        return None, None

    def observe(self, entries: Slots, attended: Attended) -> tuple[None, None]:
        return None, None

    def query_statistics(
        self, entries: Slots, moment: Moment
    ) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq D D"]]:
        assert moment.layer.statistics is not None
        rows = entries.keys.shape[0]
        mean, covariance = (moment.layer.statistics[name] for name in ("query_mean", "query_cov"))
        return jnp.broadcast_to(mean, (rows, *mean.shape)), jnp.broadcast_to(covariance, (rows, *covariance.shape))


@preset
def expected_attention_stats(
    budget: int | float = 1024,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    every: int | None = None,
) -> Policy:
    """Retains the entries to which queries of other texts would attend from the next positions.

        z_c = scale * k_c . R m + scale^2 / 2 * k_c . R C R' k_c
        score[h, c] = (mean over the query group of softmax_c(z) + epsilon) * |v_c|

    R is the mean RoPE matrix of the next `future` positions. The score is that of `expected_attention`, with the mean m
    and the covariance C of query heads as they were measured on a set of texts instead of the prompt's own. Nothing is
    observed, so it may also evict while decoding.

    m and C are statistics beside the parameters: `kvjax.with_statistics(params, FOLDER)` reads those that `kvjax
    measure-statistics` writes or the authors published.

    Args:
        budget: the number of entries retained of the prompt, sinks included. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        sinks: the number of first tokens. They are always retained, and not scored.
        future: the number of next positions over which rotations are averaged.
        covariance: whether the second term of the logit counts.
        value_norm: whether attention is multiplied by the norm of the value.
        epsilon: added to the attention first. It has no effect without `value_norm`.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + `every`, or sinks + 1 without
            `every`. Parameters without these statistics are refused when a prompt is read.
    """
    return Policy(
        score=SavedExpectedAttention(sinks, future, covariance, value_norm, epsilon),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
        every=every,
    )
