"""The redundancy of an entry's key: its similarity to the other keys of its head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import finite_or_zero

BLOCK = 128  # keys that are compared with all keys at once


def redundancy(entries: Slots, threshold: float) -> Float[Array, "B H M"]:
    """Returns the softmax over all entries c of a head of the mean over its entries i of s(i, c), float32.

    s(i, c) is the cosine of the keys of i and c, and 0 for c = i. It is also 0 if c is the most recent of the entries
    whose cosine with i exceeds the threshold: of several similar keys the latest is not redundant. Keys are compared in
    blocks, so that no array of size M x M exists.
    """
    keys = entries.keys.astype(jnp.float32)
    unit = keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    positions, held = entries.positions, entries.positions >= 0
    M = positions.shape[-1]
    block = min(BLOCK, M)
    rows = jnp.pad(unit, [(0, 0), (0, 0), (0, -M % block), (0, 0)])
    places = jnp.pad(positions, [(0, 0), (0, 0), (0, -M % block)], constant_values=-1)

    def add(total: Array, start: Array) -> tuple[Array, None]:
        some = jax.lax.dynamic_slice_in_dim(rows, start, block, axis=2)
        own = jax.lax.dynamic_slice_in_dim(places, start, block, axis=2)[..., None]
        others = held[:, :, None] & (own >= 0) & (own != positions[:, :, None])
        cosines = jnp.where(others, jnp.einsum("BHRD,BHMD->BHRM", some, unit), 0)
        similar = others & (cosines > threshold)
        latest = jnp.max(jnp.where(similar, positions[:, :, None], -1), axis=-1, keepdims=True)
        return total + jnp.sum(jnp.where(similar & (positions[:, :, None] == latest), 0, cosines), axis=2), None

    total, _ = jax.lax.scan(add, jnp.zeros(positions.shape, jnp.float32), jnp.arange(0, rows.shape[2], block))
    return softmax(total / jnp.maximum(jnp.sum(held, axis=-1, keepdims=True), 1), held)


def softmax(x: Float[Array, "*B M"], counted: Bool[Array, "*B M"]) -> Float[Array, "*B M"]:
    """Returns the softmax over the entries that are counted, 0 for the others."""
    top = jnp.max(jnp.where(counted, x, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(counted, jnp.exp(x - finite_or_zero(top)), 0)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
