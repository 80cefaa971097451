"""Exact top-k by bisection on the bits of the float: 32 counting passes and no sort, for any k up to M."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..traced_once import traced_once


def top_tokens(
    scores: Float[Array, "B H M"],
    positions: Int[Array, "B H M"],
    counts: Int[Array, "B H"],
    *,
    size: int,
) -> Int[Array, "B H size"]:
    """Computes what the reference defines."""
    eligible = scores > -jnp.inf
    counts = jnp.minimum(counts, jnp.sum(eligible, axis=-1))[..., None]
    order = jnp.where(eligible, _ordered_bits(scores), jnp.uint32(0))
    threshold = _kth_largest(order, counts)
    above = order > threshold
    missing = counts - jnp.sum(above, axis=-1, keepdims=True)
    tied = eligible & (order == threshold)
    earliness = jnp.where(tied, ~positions.astype(jnp.uint32), jnp.uint32(0))
    chosen = (counts > 0) & (above | (tied & (missing > 0) & (earliness >= _kth_largest(earliness, missing))))
    return compact(chosen, size)


def top_counts(scores: Float[Array, "B units M"], totals: Int[Array, "B"]) -> Int[Array, "B units"]:
    """Counts, for each unit, its scores among the `totals` largest scores of its batch row. The counts are exact.

    Units are heads, or layers and heads, that compete for a common budget. Of equal scores, those of earlier units come
    first. -inf never counts, so the counts of a row may add up to less than its total.
    """
    eligible = scores > -jnp.inf
    totals = jnp.minimum(totals, jnp.sum(eligible, axis=(1, 2)))
    order = jnp.where(eligible, _ordered_bits(scores), jnp.uint32(0))
    flat = order.reshape(order.shape[0], 1, -1)
    threshold = _kth_largest(flat, totals[:, None, None])
    above = jnp.sum(order > threshold, axis=-1)
    tied = jnp.sum(eligible & (order == threshold), axis=-1)
    missing = (totals - jnp.sum(above, axis=-1))[:, None]
    return above + jnp.clip(missing - (jnp.cumsum(tied, axis=-1) - tied), 0, tied)


@traced_once
def compact(chosen: Bool[Array, "B H M"], size: int) -> Int[Array, "B H size"]:
    """Returns indices of the true entries of each head, ascending, followed by -1; those beyond `size` are dropped."""
    B, H, M = chosen.shape
    slot = jnp.where(chosen, jnp.cumsum(chosen, axis=-1) - 1, size)
    b, h = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
    empty = jnp.full((B, H, size), -1, jnp.int32)
    return empty.at[b, h, slot].set(jnp.arange(M, dtype=jnp.int32), mode="drop")


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns unsigned integers > 0 in the order of the floats; -0.0 equals 0.0."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # XLA simplifies x + 0.0 to x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _kth_largest(x: UInt32[Array, "B H M"], k: Int[Array, "B H 1"]) -> UInt32[Array, "B H 1"]:
    """Finds the k-th largest integer of each head, bit by bit from the top. It is the largest uint32 where k is 0."""

    def decide(i: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))
        enough = jnp.sum(x >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    return jax.lax.fori_loop(0, 32, decide, jnp.zeros(k.shape, jnp.uint32))
