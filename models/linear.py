"""Weights with logical axes, and products with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    """Returns a normal weight of variance 1 / fan_in, tagged with its logical axes.

    `kvjax.mesh.sharding` maps the logical axes to mesh axes.
    """
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), out_sharding=axes, eager_sharding=False)


def bias(wanted: bool, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param | None:
    """Returns a zero bias, or None if the family has no such bias."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False) if wanted else None


def linear(x: Float[Array, "... I"], weight: Float[Array, "I O"], bias: nnx.Param | None) -> Float[Array, "... O"]:
    """Returns `x @ weight`, plus the flattened bias if there is one."""
    if x.size == x.shape[-1] and x.size % 2 == 0 and x.dtype == weight.dtype == jnp.float32:
        product = jax.lax.platform_dependent(x, weight, cpu=_by_halves, default=jnp.matmul)
    else:
        product = x @ weight
    return product if bias is None else product + bias[...].reshape(-1)


def _by_halves(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Returns `x @ weight` of a single row as a batch of two products.

    A CPU reads the weights faster in this form (docs/benchmarks.md). No array of the weight's size is written. Without
    the barrier XLA moves the reshape behind the addition that follows, then behind the next one, and simplifies the
    whole program once more for each.
    """
    inputs, outputs = weight.shape
    halves = jnp.einsum("hi,hio->ho", x.reshape(2, -1), weight.reshape(2, inputs // 2, outputs))
    return jax.lax.optimization_barrier((halves[0] + halves[1]).reshape(*x.shape[:-1], outputs))
