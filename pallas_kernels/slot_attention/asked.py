"""Query rows of earlier steps, whose attention is wanted in the same pass over the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..window_scores.reduction import Reduction

LEAST_TILE_ROWS = 16  # of a matrix product on a GPU
MOST_TILE_ROWS = 64  # extra rows per product
MOST_BYTES = 48 << 10  # of the extra rows of a kv head; more leave no room for keys and get a pass of their own


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

    def tiles(self, heads: int) -> tuple[ExtraRows, ExtraReduction] | None:
        """Arranges the rows of each kv head in tiles, so that a reduction over tiles and rows is `reduction`.

        Returns None if one pass of a GPU's kernel cannot compute that reduction, or if the rows take too much memory.
        """
        B, Hq, X, D = self.queries.shape
        G, reduction = Hq // heads, self.reduction
        over_rows, over_group = ("max" if kind == "max" else "sum" for kind in (reduction.rows, reduction.group))
        lse = jnp.where((self.positions < 0)[:, None] | jnp.isneginf(self.lse), jnp.inf, self.lse)
        q, lse, t = self.queries.reshape(B, heads, G, X, D), lse.reshape(B, heads, G, X), self.positions[:, None]
        if over_rows == over_group:  # the order of all G X rows does not matter
            q, lse, t = q.reshape(B, heads, 1, -1, D), lse.reshape(B, heads, 1, -1), jnp.tile(t, (1, 1, G))
            size = min(_tile_rows(G * X), MOST_TILE_ROWS)
        elif reduction.first == "rows":
            return None
        else:  # a tile holds the rows of one query head
            t, size = jnp.repeat(t, G, axis=1), _tile_rows(X)
        padding = -lse.shape[3] % size
        q, lse, t = pad(q, padding, 3), pad(lse, padding, 3, jnp.inf), pad(t, padding, 2, -1)
        q, lse, t = q.reshape(B, heads, -1, D), lse.reshape(B, heads, -1), t.reshape(B, -1)
        nbytes = t.shape[1] * pl.next_power_of_2(D) * q.dtype.itemsize
        if reduction.rows == "mean" or size > MOST_TILE_ROWS or nbytes > MOST_BYTES:
            return None
        return ExtraRows(q, lse, t), ExtraReduction(size, over_group, over_rows)


class ExtraRows(NamedTuple):
    """The rows of `Asked` in tiles: a kernel computes their weights on the slots, and no context.

    Attributes:
        lse: the float32 log-sum-exp of each row's own step; +inf makes all weights of a row 0.
    """

    queries: Float[Array, "B H X D"]
    lse: Float[Array, "B H X"]
    positions: Int[Array, "B X"]


class ExtraReduction(NamedTuple):
    """Reduces the weights of extra rows to one number per slot: over tiles of rows, then over the rows of a tile.

    Attributes:
        size: rows per tile, a power of two >= 16 that divides the number of rows.
        tiles: "sum" or "max".
        rows: "sum" or "max".
    """

    size: int
    tiles: str
    rows: str


def _tile_rows(rows: int) -> int:
    return max(LEAST_TILE_ROWS, pl.next_power_of_2(rows))
