"""L2 norm of keys (Devoto et al., EMNLP 2024, arXiv 2406.11430): retains the entries with the smallest keys.

Differences from the paper:

- The paper leaves its first two layers uncompressed. This preset compresses all layers, as kvpress does;
  `DenseLayers(budget_of(...), first=2)` as the policy's budget is the paper's form.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score

from .common.budgets import budget_of
from .registry import preset


@dataclass(frozen=True)
class KeyNorm(Score):
    """The negative Euclidean norm of the key: entries with small keys receive much attention."""

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True, marks=frozenset({"signed"}))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return -jnp.linalg.norm(entries.keys.astype(jnp.float32), axis=-1)


@preset
def knorm(budget: int | float = 1024, sinks: int = 0, recent: int = 0, every: int | None = None) -> Policy:
    """Retains the entries whose keys have the smallest norms, because entries with small keys receive much attention.

        score[h, c] = -|k_c|

    RoPE does not change the norm. The score needs neither attention weights nor state.

    Args:
        budget: the number of entries retained of the prompt per kv head. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained.
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`.
    """
    return Policy(
        score=KeyNorm(),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
