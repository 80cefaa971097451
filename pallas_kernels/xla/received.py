"""Accumulates tile by tile what keys received from blocks of queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..arrays import fold
from ..window_scores.reduction import Reduction

PARTS = 4  # of a block's queries, which are added to each other as the weights are read
# From a row of a tile and a number of rows, their weights [P, rows, K]. The rows of each query head are consecutive.
Weights: TypeAlias = Callable[[int, int], Array]


class Total(NamedTuple):
    """The sums that are accumulated for a reduction.

    Attributes:
        rows: over the queries.
        group: over the query heads of a kv head, before the queries. "none" keeps query heads apart.
    """

    rows: Literal["sum", "max"]
    group: Literal["sum", "max", "none"]

    @classmethod
    def of(cls, reduction: Reduction) -> Total:
        """The total from which `finished` makes a reduction. Its `rows` are not "mean"."""
        rows: Literal["sum", "max"] = "max" if reduction.rows == "max" else "sum"
        if reduction.group == "none" or not (reduction.commutes or reduction.first == "group"):
            return cls(rows, "none")
        return cls(rows, "max" if reduction.group == "max" else "sum")

    def zeros(self, kv_heads: int, group: int, keys: int) -> Float[Array, "P *G M"]:
        """The total of no query."""
        return jnp.zeros((kv_heads, group, keys) if self.group == "none" else (kv_heads, keys), jnp.float32)

    def add(
        self, total: Float[Array, "P *G M"], weights: Weights, group: int, block: int, start: Array
    ) -> Float[Array, "P *G M"]:
        """The total with the weights of one more block of queries on the K keys from `start` on."""
        parts = math.gcd(block, PARTS)
        size = block // parts

        def of_heads(part: int) -> list[Float[Array, "P R/parts K"]]:
            return [weights(g * block + part * size, size) for g in range(group)]

        def over(kind: str, each: Iterable[Array]) -> Array:
            return reduce(jnp.maximum if kind == "max" else jnp.add, each)

        def over_rows(each: Iterable[Array]) -> Float[Array, "P K"]:
            # The condition always holds. XLA reduces rows by a library that takes no selection. Without one the library
            # would take the parts, each of which would be copied for it.
            rows = jnp.where(start >= 0, over(self.rows, each), 0.0)
            return (jnp.max if self.rows == "max" else jnp.sum)(rows, axis=1)

        by_part = map(of_heads, range(parts))
        if self.group == "none":
            tile = jnp.stack([over_rows(of_head) for of_head in zip(*by_part, strict=True)], axis=1)
        else:
            tile = over_rows(over(self.group, heads) for heads in by_part)
        before = jax.lax.dynamic_slice_in_dim(total, start, tile.shape[-1], axis=-1)
        after = jnp.maximum(before, tile) if self.rows == "max" else before + tile
        return jax.lax.dynamic_update_slice_in_dim(total, after, start, axis=-1)

    def finished(self, total: Float[Array, "P *G M"], reduction: Reduction, group: int) -> Float[Array, "P *G M"]:
        """The reduction of the weights of all queries, given the number of query heads per kv head."""
        if reduction.group == "none":
            return total
        if self.group == "none":
            return fold(total, reduction.of_group, axis=1)
        return total / group if reduction.group == "mean" else total
