"""KeyDiff (Park et al., NeurIPS 2025, arXiv 2504.15364): retains the entries whose keys are unlike the others.

Differences from the paper:

- The paper reads prompts in blocks and compresses after each block, which is `chunk=` with `compress="chunk"` here. The
  default compresses once after the prompt, as kvpress does.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import dot_products, weighted_sum
from kvjax.policy import Moment, Needs, Policy, Protect, Score

from .common.budgets import budget_of
from .registry import preset


@dataclass(frozen=True)
class KeyDifference(Score):
    """The negative cosine between a key and the anchor, which is the mean of all keys scaled to length 1."""

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"signed"}))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        keys = entries.keys.astype(jnp.float32)
        length = jnp.maximum(jnp.sqrt(jnp.sum(keys * keys, axis=-1)), 1e-12)
        share = jnp.where(entries.positions >= 0, 1 / length, 0)
        anchor = weighted_sum(keys, share)  # the sum of all unit keys, which has the direction of their mean
        anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -dot_products(keys, anchor) / length


@preset
def keydiff(budget: int | float = 1024, sinks: int = 0, recent: int = 0, every: int | None = None) -> Policy:
    """Retains the entries whose keys are least similar to the anchor, which is the mean of all unit keys.

        score[h, c] = -cos(k_c, mean over cached j of k_j / |k_j|)

    Keys are compared as they are cached, after RoPE. The score needs neither attention weights nor state.

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
        score=KeyDifference(),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )
