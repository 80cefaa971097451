"""Shapes that tiles divide."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array


def pad(x: Array, amount: int, axis: int, value: float = 0) -> Array:
    """Appends `amount` entries of `value` along one axis."""
    widths = [(0, amount if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if amount else x
