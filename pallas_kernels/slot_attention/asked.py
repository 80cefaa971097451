"""Query rows of earlier steps, whose attention is wanted in the same pass over the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ..window_scores.reduction import Reduction


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asked:
    """X extra query rows from earlier steps, whose attention weights on the current keys are wanted.

    Attributes:
        queries: as they were multiplied with keys in their own step, rotated if keys are.
        lse: the float32 log-sum-exp of each query in its own step. It normalises the weights.
        positions: of the queries, in any order; -1 for a row to leave out.
        reduction: of the [G, X] weights of a key to one number.
    """

    queries: Float[Array, "B Hq X D"]
    lse: Float[Array, "B Hq X"]
    positions: Int[Array, "B X"]
    reduction: Reduction = field(metadata={"static": True})

    def scores(
        self, by: Callable[..., Array], k: Float[Array, "B H M D"], k_positions: Int[Array, "B H M"], **options: Any
    ) -> Float[Array, "B H M"]:
        """Returns the reduced weights, computed in a pass over the keys of its own.

        Args:
            by: an implementation of `window_scores`.
            options: further arguments of `window_scores`.
        """
        lse, reduction = self.lse, self.reduction
        return by(self.queries, k, self.positions, k_positions, lse=lse, reduction=reduction, **options)
