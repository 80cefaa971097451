"""Exact top-k by bisection on the bits of the float: 32 counting passes, no sort, any k up to the number of entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def top_tokens(
    scores: Float[Array, "B H M"],
    positions: Int[Array, "B H M"],
    counts: Int[Array, "B H"],
    *,
    size: int,
) -> Int[Array, "B H size"]:
    """Indices of the `counts` largest scores of each row, ascending, -1 after the last.

    Args:
        scores: float32; -inf is never chosen, so a row may yield fewer than its count.
        positions: token positions, all different among the eligible; equal scores go to the earlier one.
        counts: at most `size` each.
    """
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


def top_counts(scores: Float[Array, "B X M"], totals: Int[Array, "B"]) -> Int[Array, "B X"]:
    """How many of each X's scores are among the `totals` largest of all of a row's, exactly.

    Of equal scores those of an earlier X come first. -inf never counts, so a row may add up to less than its total.
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


def compact(chosen: Bool[Array, "B H M"], size: int) -> Int[Array, "B H size"]:
    """Indices of the true entries of each row, ascending, -1 after the last. Those beyond `size` are dropped."""
    B, H, M = chosen.shape
    slot = jnp.where(chosen, jnp.cumsum(chosen, axis=-1) - 1, size)
    b, h = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
    empty = jnp.full((B, H, size), -1, jnp.int32)
    return empty.at[b, h, slot].set(jnp.arange(M, dtype=jnp.int32), mode="drop")


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Unsigned integers in the order of the floats, -0.0 equal to 0.0, all above 0."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # adding 0.0 would do, if XLA did not simplify that away
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _kth_largest(x: UInt32[Array, "B H M"], k: Int[Array, "B H 1"]) -> UInt32[Array, "B H 1"]:
    """The k-th largest of each row, found bit by bit from the top; the largest integer where k is 0."""

    def decide(i: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        enough = jnp.sum(x >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    return jax.lax.fori_loop(0, 32, decide, jnp.zeros(k.shape, jnp.uint32))
