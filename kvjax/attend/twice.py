"""Steps of one row run with the row twice, because a GPU does two rows faster than one.

XLA computes the product of a single row and a weight of less than 10 million elements without matrix units: it writes
an array of the weight's size and adds up the rows of that array. It also normalises a single row in two kernels. A
single row therefore runs through the decoder twice.

XLA also does the same work of many layers in one kernel, such as the search for empty slots, if the layers read a
common array. A single number does not count as an array.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from kvjax.cache import Entries
from kvjax.mesh.sharding import DATA
from kvjax.models import Attend, AttentionLayer


def runs_twice(batch: int, mesh: Mesh | None) -> bool:
    """Returns whether a decode step runs faster with each row twice: on a GPU that has one row."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "gpu" and batch == (1 if mesh is None else mesh.shape[DATA])


def attending_once(attend: Attend) -> Attend:
    """Returns the attention function of rows that run twice, each of which attends once."""

    def attend_once(
        layer: AttentionLayer, q: Array, k: Array, v: Array, entries: Entries
    ) -> tuple[Float[Array, "2*B Hq 1 D"], Entries]:
        record = replace(layer, hidden=jax.tree.map(once, layer.hidden), residual=jax.tree.map(once, layer.residual))
        q, k, v = jax.tree.map(once, (q, k, v))
        context, entries = attend(record, q, k, v, entries)
        return jnp.repeat(context, 2, axis=0), entries

    return attend_once


def in_array(x: Shaped[Array, "B"]) -> Shaped[Array, "B"]:
    """Returns `x`. On a GPU a single number is read from an array of two."""
    if len(x) != 1:
        return x
    return jax.lax.platform_dependent(x, cuda=lambda x: twice(x)[:1], default=lambda x: x)


def twice(x: Shaped[Array, "B ..."]) -> Shaped[Array, "2*B ..."]:
    """Returns every row twice. XLA does not see that they are equal."""
    return jax.lax.optimization_barrier(jnp.repeat(x, 2, axis=0))


def once(x: Shaped[Array, "2*B ..."]) -> Shaped[Array, "B ..."]:
    """Returns one of the two copies of each row."""
    return x.reshape(len(x) // 2, 2, *x.shape[1:])[:, 0]
