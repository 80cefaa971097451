"""Small array helpers that kernels share."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array

Fold = Literal["sum", "mean", "max"]


def fold(x: Array, how: Fold, axis: int) -> Array:
    """Reduces one axis."""
    if how == "sum":
        return jnp.sum(x, axis=axis)
    return jnp.mean(x, axis=axis) if how == "mean" else jnp.max(x, axis=axis)


def pad(x: Array, amount: int, axis: int, value: float = 0) -> Array:
    """Appends `amount` entries of `value` along one axis."""
    widths = [(0, amount if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if amount else x
