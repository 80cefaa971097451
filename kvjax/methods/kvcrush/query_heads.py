"""The attention that entries received from each query head, for bits per query head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Score, ScoreWrapper, check_kind

from ..common.refusals import check_own_positions


class Watched(NamedTuple):
    """The base's state per slot, and the attention from each query head.

    Attributes:
        received: the attention that the entry received from each of the G query heads of its kv head, float32.
        base: the base's state per slot.
    """

    received: Float[Array, "B H G S"]
    base: Any


@dataclass(frozen=True)
class QueryHeadAttention(ScoreWrapper):
    """Wraps a score, and sums the attention on entries from each query head (Algorithm 1).

    `by_query_head` gives w_h(t), the mean of the softmax weights on t over all queries so far that could see t. Its
    state takes 4 bytes per slot and query head while a prompt is read, and one more pass over the keys of each call and
    step.

    Attributes:
        base: the score that ranks entries.
    """

    def __post_init__(self) -> None:
        check_kind("base", self.base, Score)
        if self.base.needs.queries == "unrotated":
            raise ValueError(
                f"QueryHeadAttention: its base {type(self.base).__name__} observes queries before RoPE, and "
                "bits='query' observes them after RoPE; choose another base"
            )

    @property
    def needs(self) -> Needs:
        return replace(self.base.needs, queries="rotated", marks=self.base.needs.marks | {"query_heads"})

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "compares queries with cached keys after RoPE")
        self.base.check(policy)

    def init(self, shape: LayerShape) -> tuple[Watched, Any]:
        per_slot, per_row = self.base.init(shape)
        return Watched(shape.per_slot(shape.heads // shape.kv_heads), per_slot), per_row

    def observe(self, entries: Slots, attended: Attended) -> tuple[Watched, Any]:
        received = entries.per_slot.received
        per_slot, per_row = self.base.observe(_of_base(entries), attended)
        if attended.replay is None:
            received = received + _received(entries, attended)
        return Watched(received, per_slot), per_row

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return self.base(_of_base(entries), moment)


def by_query_head(entries: Slots) -> Float[Array, "B Hq M"]:
    """Returns a score per entry and query head of its kv head, for a score that is marked "query_heads".

    The newest token of each row must be among the entries.
    """
    queries = jnp.max(entries.positions, axis=-1, keepdims=True) + 1 - entries.positions
    mean = entries.per_slot.received / jnp.maximum(queries, 1)[:, :, None]
    return mean.reshape(mean.shape[0], -1, mean.shape[-1])


def _of_base(entries: Slots) -> Slots:
    """Returns the entries with the base's state."""
    return replace(entries, per_slot=entries.per_slot.base)


def _received(entries: Slots, attended: Attended) -> Float[Array, "B H G M"]:
    """Returns the attention of this call's queries, query head by query head, so that no group is reduced."""
    q, lse = (attended.heads.whole_groups(x) for x in (attended.queries, attended.lse))
    return entries.received(
        q=q,
        lse=lse,
        query_positions=attended.positions,
        **attended.layer.logits,
        reduction=Reduction(rows="sum", group="none"),
    )
