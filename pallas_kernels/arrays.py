"""Small array functions that kernels and their references have in common."""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

Fold = Literal["sum", "mean", "max"]


def fold(x: Array, kind: Fold, axis: int) -> Array:
    """Reduces one short axis, entry by entry. A reduction of XLA's CPU backend takes ten times as long."""
    entries = [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    folded = reduce(jnp.maximum if kind == "max" else jnp.add, entries)
    return folded / len(entries) if kind == "mean" else folded


def after_last(x: Bool[Array, "... n"]) -> Int[Array, "..."]:
    """Returns the index after the last true entry, or 0 if no entry is true."""
    index = jnp.where(x, jnp.arange(1, x.shape[-1] + 1, dtype=jnp.int32), 0)
    return jax.lax.reduce(index, np.int32(0), jax.lax.max, [x.ndim - 1])  # `initial=` of jnp.max is one more kernel


def by_member(x: Shaped[Array, "B Hq *rest"], kv_heads: int) -> Shaped[Array, "G B H *rest"]:
    """Returns the first query head of all groups, then the second, and so on."""
    return jnp.moveaxis(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]), 2, 0)


def check_channels(k: Any, v: Any) -> None:
    """Raises NotImplementedError unless keys and values have the same number of channels, as the kernels expect."""
    if k.shape[-1] != v.shape[-1]:
        raise NotImplementedError(f"keys of {k.shape[-1]} channels and values of {v.shape[-1]}: expected as many")


def pad(x: Array, amount: int, axis: int, value: float = 0) -> Array:
    """Appends `amount` entries of `value` along one axis."""
    widths = [(0, amount if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if amount else x
