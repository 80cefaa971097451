"""Weights with logical axes, products with them, and their division into heads."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.random import normal
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..pallas_kernels import matmul


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    """Returns a normal weight of variance 1 / fan_in, tagged with its logical axes.

    `kvjax.mesh.sharding` maps the logical axes to mesh axes.
    """
    value = normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), out_sharding=axes, eager_sharding=False)


def bias(wanted: bool, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param | None:
    """Returns a zero bias, or None if the family has no such bias."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False) if wanted else None


def linear(x: Float[Array, "... I"], weight: Float[Array, "I O"], bias: nnx.Param | None) -> Float[Array, "... O"]:
    """Returns `x @ weight`, plus the flattened bias if there is one."""
    product = matmul(x, weight)
    return product if bias is None else product + bias[...].reshape(-1)


def heads_first(x: Float[Array, "B N O"], head_dim: int) -> Float[Array, "B H N D"]:
    """Splits the last axis into heads and puts them before the tokens."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, head_dim), 1, 2)
