"""Forms of plain XLA that depend on the platform: products, and numbers that layers share."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .arrays import pad


def matmul(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Returns `x @ weight`. A GPU multiplies a single row `beside_zeros`, a CPU one of float32 `as_in_batch`."""
    if x.size != x.shape[-1]:
        return x @ weight
    forms = {"cuda": beside_zeros}
    if x.size % 2 == 0 and x.dtype == weight.dtype == jnp.float32:
        forms["cpu"] = as_in_batch
    return jax.lax.platform_dependent(x, weight, **forms, default=jnp.matmul)


def beside_zeros(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Returns `x @ weight` of a single row as one of two rows, of which the other is zero.

    For a GPU, XLA computes the product of a single row and a weight of less than 10 million elements without matrix
    units: it writes an array of the weight's size and adds up the rows of that array.
    """
    return (pad(x.reshape(1, -1), 1, axis=0) @ weight)[0].reshape(*x.shape[:-1], -1)


def as_in_batch(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Returns `x @ weight` of a single row as the sum of two products, of the halves of its inputs.

    - On CPUs XLA sums a single row in an order of its own, and rows of a batch in blocks of 256 inputs. With 512 inputs
      the halves are these blocks, and the row has the bits that it has in a batch. With other numbers of inputs the two
      may differ by rounding.
    - A CPU reads the weights faster in this form (docs/notes/cpu.md). No array of the weight's size is written.

    Without the barrier XLA moves the reshape behind the addition that follows, then behind the next one, and simplifies
    the whole program once more for each.
    """
    inputs, outputs = weight.shape
    halves = jnp.einsum("hi,hio->ho", x.reshape(2, -1), weight.reshape(2, inputs // 2, outputs))
    return jax.lax.optimization_barrier((halves[0] + halves[1]).reshape(*x.shape[:-1], outputs))


def apart(products: list[Float[Array, "B N O"]]) -> list[Float[Array, "B N O"]]:
    """Keeps matrix products apart from the transposes that follow.

    Without the barrier XLA transposes the weights instead of the activations. A single token is not transposed on a
    GPU, where the barrier would add a kernel.
    """

    def barred(products: list[Array]) -> list[Array]:
        return [jax.lax.optimization_barrier(product) for product in products]

    if products[0].shape[1] > 1:
        return barred(products)
    return jax.lax.platform_dependent(products, cuda=lambda products: products, default=barred)


def shared(x: Shaped[Array, "B"]) -> Shaped[Array, "B"]:
    """Returns `x`, which all layers read as one array on a GPU.

    XLA does the same work of many layers in one kernel, such as the search for empty slots, if the layers read a common
    array. Without the barrier each layer computes the array itself. A single number is no array, but part of one.
    """

    def as_array(x: Array) -> Array:
        return jax.lax.optimization_barrier(x if len(x) > 1 else jnp.repeat(x, 2))[: len(x)]

    return jax.lax.platform_dependent(x, cuda=as_array, default=lambda x: x)


def weighted_sum(keys: Float[Array, "B H M D"], weights: Float[Array, "B H M"]) -> Float[Array, "B H D"]:
    """Returns sum_m weights_m keys_m for each kv head, in float32."""
    return _with_keys("BHMD,BHM->BHD", keys, weights, along=3, over=2)


def dot_products(keys: Float[Array, "B H M D"], vector: Float[Array, "B H D"]) -> Float[Array, "B H M"]:
    """Returns the product of each key with the vector of its kv head, in float32."""
    return _with_keys("BHMD,BHD->BHM", keys, vector, along=2, over=3)


def _with_keys(products: str, keys: Array, factors: Array, *, along: int, over: int) -> Array:
    """Sums keys times factors, which lack the axis `along`, over an axis.

    A CPU runs a product of matrices faster: a step under KeyDiff takes 0.66 to 0.77 of the time. Elsewhere XLA would
    write the keys out in float32 for it, which a sum of products does not.
    """

    def by_sums(keys: Array, factors: Array) -> Array:
        return jnp.sum(keys * jnp.expand_dims(factors, along), axis=over)

    by_product = partial(jnp.einsum, products, precision="highest")
    return jax.lax.platform_dependent(keys.astype(jnp.float32), factors, cpu=by_product, default=by_sums)
