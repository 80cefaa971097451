"""Equal shares of a budget that is allocated after all layers."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout

from .allocation import check_limited


@dataclass(frozen=True)
class UniformShares(AllocatedBudget):
    """All heads of a layer retain the same number, for scores that are known only once all layers have read a prompt.

    Attributes:
        budget: entries of each kv head.
    """

    def __post_init__(self) -> None:
        check_limited(self.budget)

    @property
    def layout(self) -> Layout:
        return Layout()

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        return jnp.broadcast_to(means[..., None], scores.shape[:3])
