"""Rows that run through the decoder twice, because a GPU multiplies two rows faster than one.

XLA computes the product of a single row and a weight of less than 10 million elements without matrix units: it writes
an array of the weight's size and adds up the rows of that array. It also normalises a single row in two kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.cache import Entries
from kvjax.models import Attend, AttentionLayer, Decoder
from kvjax.sharding import DATA


def pays(batch: int, mesh: Mesh | None) -> bool:
    """Whether a decode step runs faster with each row twice: on a GPU that has one row."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "gpu" and batch == (1 if mesh is None else mesh.shape[DATA])


def twice(
    params: Decoder, tokens: Int[Array, "B 1"], attend: Attend, entries: Entries
) -> tuple[Float[Array, "B 1 E"], Entries]:
    """Returns `params(tokens, attend, entries)`. Each row runs twice, and attends once."""
    B = len(tokens)

    def first(x: Array) -> Array:
        return x.reshape(B, 2, *x.shape[1:])[:, 0]

    def attend_once(
        layer: AttentionLayer, q: Array, k: Array, v: Array, entries: Entries
    ) -> tuple[Float[Array, "2*B Hq 1 D"], Entries]:
        context, entries = attend(layer, first(q), first(k), first(v), entries)
        return jnp.repeat(context, 2, axis=0), entries

    # Without the barrier XLA finds that rows are equal.
    tokens = jax.lax.optimization_barrier(jnp.repeat(tokens, 2, axis=0))
    hidden, entries = params(tokens, attend_once, entries)
    return first(hidden), entries
