"""The score of the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Score


@dataclass(frozen=True)
class Recency(Score):
    """Later tokens score higher: the score is the position."""

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.positions.astype(jnp.float32)
