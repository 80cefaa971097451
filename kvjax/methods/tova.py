"""TOVA, token omission via attention (Oren et al., arXiv 2401.06104): evicts by the last query's attention alone.

Differences from the paper:

- The selection is that of the paper: the last token competes with the others. kvpress always retains it, which is
  `recent=1` here.
- The budget counts the entries that a query sees, itself included. The paper evicts after the query has attended, so
  that its cache size C is `budget=C + 1` while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction
from kvjax.policy import Attended, LayerShape, Moment, Needs, Policy, Protect, Received, Score

from .common.budgets import budget_of
from .registry import preset


@dataclass(frozen=True)
class LastAttention(Score):
    """The attention received from the last query, averaged over all query heads of the layer.

    All heads score alike, so they retain the same tokens in the same slots: the mean over heads is taken slot by slot.
    On a mesh that distributes kv heads it is a sum over devices at each step.
    """

    @property
    def needs(self) -> Needs:
        return Needs(received=Received(Reduction(rows="sum", group="mean"), last=1), marks=frozenset({"heads_alike"}))

    def check(self, policy: Policy) -> None:
        layout = policy.budget.layout
        if layout is not None and layout.groups is not None:
            raise ValueError(
                f"it has all heads of a layer retain the same tokens, and the budget {type(policy.budget).__name__} "
                "gives heads different numbers of entries; they cannot be combined"
            )

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], None]:
        return shape.per_slot(), None

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        assert attended.received is not None
        mean = jnp.broadcast_to(attended.heads.mean(attended.received), entries.positions.shape)
        return jnp.where(attended.lengths[:, None, None] > 0, mean, entries.per_slot), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


@preset
def tova(budget: int | float = 1024, recent: int = 0, every: int | None = 1) -> Policy:
    """Evicts the token that received the least attention from the last query, averaged over all heads of the layer.

        score[c] = mean over all query heads of softmax(q_last . k)_c

    All heads of a layer retain the same tokens. The token that attended last competes with the others.

    Args:
        budget: the entries that a query sees, itself included: the paper's cache size + 1 while decoding, cache size at
            the prompt. An integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        recent: the number of most recent tokens that are always retained.
        every: the number of tokens that are evicted at a time while decoding; None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than recent + `every`.
    """
    return Policy(
        score=LastAttention(),
        budget=budget_of(budget),
        protect=Protect(recent=recent),
        every=every,
    )
