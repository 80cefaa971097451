"""CapKV (Yang et al., arXiv 2604.25975), as kvpress's CapPress: retains tokens whose values no other value replaces.

Differences from the paper, which are those of kvpress:

- Keys and the mean query are scaled to length 1, and the largest weight of a head is 1. The paper's products are not
  scaled.
- Queries are turned to the next positions (`future`).
- Values replace output directions.

Differences from kvpress:

- Statistics are kept per row, so that rows of different lengths do not mix, and a prompt may be read in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import finite_or_zero, fold
from kvjax.pallas_kernels.arrays import by_member
from kvjax.pallas_kernels.matrices import cholesky, solve_lower
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Score, check_integer, check_number

from .common.budgets import budget_of
from .common.in_turns import in_turns
from .common.mean_rotation import mean_rotation
from .common.refusals import check_own_positions, check_sinks
from .registry import preset


class QueryMean(NamedTuple):
    """The number and the mean of the queries of each row before rotation."""

    number: Float[Array, "B Hq"]
    mean: Float[Array, "B Hq D"]


@dataclass(frozen=True)
class ValueCapacity(Score):
    """The relevance of a token times the leverage of its value among all values weighed by relevance.

    The state is the mean query before rotation of each query head. On a mesh where devices hold the same kv head these
    are gathered once per call.

    Attributes:
        tau: the inverse temperature of the cosine between a key and the mean query.
        sinks: the number of first tokens whose queries, keys and values do not count.
        future: the number of next positions over which the rotation of the mean query is averaged.
        epsilon: added to the relevance within the matrix of values.
    """

    tau: float = 5.0
    sinks: int = 4
    future: int = 512
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_number("tau", self.tau, "a number >= 0", lambda x: x >= 0)
        check_integer("sinks", self.sinks, least=0)
        check_integer("future", self.future, least=1)
        check_number("epsilon", self.epsilon, "a number >= 0", lambda x: x >= 0)

    @property
    def needs(self) -> Needs:
        return Needs(queries="unrotated", marks=frozenset({"weighs_values"}))

    def check(self, policy: Policy) -> None:
        check_sinks(self.sinks, policy)
        check_own_positions(policy, "compares keys, rotated to their own positions, with queries at the next ones")

    def init(self, shape: LayerShape) -> tuple[None, QueryMean]:
        rows = (shape.batch, shape.heads)
        return None, QueryMean(jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, shape.head_dim), jnp.float32))

    def observe(self, entries: Slots, attended: Attended) -> tuple[None, QueryMean]:
        old: QueryMean = entries.per_row
        counted = (attended.positions >= self.sinks)[:, None, :, None].astype(jnp.float32)
        new = jnp.sum(attended.queries.astype(jnp.float32) * counted, axis=2)
        number = old.number + jnp.sum(counted, axis=(2, 3))
        new = attended.heads.whole_groups(new)
        apart = new - (number - old.number)[..., None] * old.mean
        return None, QueryMean(number, old.mean + apart / jnp.maximum(number, 1)[..., None])

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        B, H, _, D = entries.keys.shape
        anchor = mean_rotation(moment, D, np.arange(self.future))(entries.per_row.mean[:, :, None])[:, :, 0]
        scored = entries.positions >= self.sinks
        keys = entries.keys.astype(jnp.float32)
        keys /= jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        values = jnp.where(scored[..., None], entries.values.astype(jnp.float32), 0)

        def of_head(anchor: Float[Array, "B H D"]) -> Float[Array, "B H M"]:
            """Handles one query head of every group, so that the values are not weighted by all of them at once."""
            cosine = jnp.clip(jnp.einsum("BHMD,BHD->BHM", keys, anchor, precision="highest"), -1, 1)
            cosine = jnp.where(scored, cosine, -jnp.inf)
            top = jnp.max(cosine, axis=-1, keepdims=True)
            weights = jnp.where(scored, jnp.exp(self.tau * (cosine - finite_or_zero(top))), 0)
            weighed = values * (weights + self.epsilon)[..., None]
            capacity = jnp.eye(D) + jnp.einsum("BHMD,BHME->BHDE", weighed, values, precision="highest")
            factor = cholesky(capacity)
            rows = jnp.broadcast_to(factor, (B, H, D, D))
            half = solve_lower(rows, jnp.swapaxes(values, -1, -2))
            return weights * jnp.sum(half**2, axis=2)

        return fold(in_turns(of_head, by_member(anchor, H)), "mean", axis=0)


@preset
def capkv(
    budget: int | float = 1024, tau: float = 5.0, sinks: int = 4, future: int = 512, epsilon: float = 1e-6
) -> Policy:
    """Compresses the prompt once, by the relevance of tokens times the leverage of their values.

    With m the mean query of the prompt, turned by the mean RoPE matrix of the next `future` positions,

        w_c = exp(tau * (cos(k_c, m) - max over j of cos(k_j, m))),    A = I + sum over j of w_j v_j v_j'
        score[h, c] = mean over the query group of w_c * v_c' A^-1 v_c

    A token scores high if later queries are likely to attend to it and no other relevant token has a similar value. The
    score needs no attention weights. The answer is added to the retained entries.

    Args:
        budget: the number of entries retained of the prompt, sinks included. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        tau: the inverse temperature of relevance.
        sinks: the number of first tokens. They are always retained; neither their queries nor their keys count.
        future: the number of next positions over which rotations are averaged.
        epsilon: added to w in A.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `sinks` + 1.
    """
    return Policy(
        score=ValueCapacity(tau, sinks, future, epsilon),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks),
    )
