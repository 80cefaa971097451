"""Computes with a matrix of its own for each row, for pairs of a token and a group such as an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .grouped_product import grouped_product


class Times(Protocol):
    """Returns the product of each row with the matrix of its group, plus the group's bias if there are biases."""

    def __call__(
        self, rows: Float[Array, "M I"], matrices: Float[Array, "X I O"], bias: Float[Array, "X O"] | None, /
    ) -> Float[Array, "M O"]: ...


class OfRows(Protocol):
    """Computes a result for each row with products of `times`."""

    def __call__(self, rows: Float[Array, "M I"], times: Times, /) -> Float[Array, "M O"]: ...


def by_group(
    compute: OfRows, tokens: Float[Array, "n I"], group: Int[Array, "n K"], groups: int
) -> Float[Array, "n K O"]:
    """Returns what `compute` gives for each token and each of its groups.

    A GPU gathers the matrices if there are at most as many pairs as groups: XLA reads them in the kernel that
    multiplies, writes no copy, and launches 10 kernels fewer for each layer with experts (docs/extend/kernels.md).

    Args:
        group: of `groups` many. For the group `groups`, which has no matrices, the result is undefined.
    """

    def sorted_by_group(tokens: Float[Array, "n I"], group: Int[Array, "n K"]) -> Float[Array, "n K O"]:
        key = group.reshape(-1)
        order = jnp.argsort(key)
        own = jnp.minimum(key[order], groups - 1)
        sizes = jnp.bincount(key, length=groups + 1)[:groups].astype(jnp.int32)
        times = _times(lambda rows, matrices: grouped_product(rows, matrices, sizes), own)
        each = compute(tokens[order // group.shape[1]], times)
        return jnp.zeros_like(each).at[order].set(each, unique_indices=True).reshape(*group.shape, -1)

    def gathered(tokens: Float[Array, "n I"], group: Int[Array, "n K"]) -> Float[Array, "n K O"]:
        own = jnp.minimum(group, groups - 1).reshape(-1)
        times = _times(lambda rows, matrices: jnp.einsum("MI,MIO->MO", rows, matrices[own]), own)
        return compute(jnp.repeat(tokens, group.shape[1], axis=0), times).reshape(*group.shape, -1)

    if group.size > groups:
        return sorted_by_group(tokens, group)
    return jax.lax.platform_dependent(tokens, group, cuda=gathered, default=sorted_by_group)


def _times(product: Callable[[Array, Array], Array], own: Int[Array, "M"]) -> Times:
    """Adds the bias of each row's own group to its product."""

    def times(
        rows: Float[Array, "M I"], matrices: Float[Array, "X I O"], bias: Float[Array, "X O"] | None
    ) -> Float[Array, "M O"]:
        products = product(rows, matrices)
        return products if bias is None else products + bias[own]

    return times
