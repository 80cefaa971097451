"""One bit per entry for each of the last W queries, which a query's weight on the entry decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction, window_scores
from kvjax.policy import Attended, LayerShape, Needs, Received

WORD = 32  # bits of state per number
MEAN = Reduction(rows="sum", group="mean")
# The observation that a score of such bits declares.
NEEDS = Needs(received=Received(MEAN, calls="steps"), queries="rotated")

# (weights of one query, averaged over the query group, as multiples of the mean weight; what it saw) -> its bits
Rule: TypeAlias = Callable[[Float[Array, "B H M"], Bool[Array, "B H M"]], Bool[Array, "B H M"]]


def no_bits(shape: LayerShape, window: int) -> UInt32[Array, "B H window/32 S"]:
    """Returns the bits of empty slots: ceil(window / 32) uint32 numbers per slot."""
    return shape.per_slot(-(-window // WORD), dtype=jnp.uint32)


def number(bits: UInt32[Array, "B H window/32 M"]) -> Float[Array, "B H M"]:
    """Returns the number of bits of each entry that are set."""
    return jnp.sum(jax.lax.population_count(bits), axis=2).astype(jnp.float32)


def noted(
    bits: UInt32[Array, "B H window/32 M"], window: int, entries: Slots, attended: Attended, rule: Rule
) -> tuple[UInt32[Array, "B H window/32 M"], Float[Array, "B H M"]]:
    """Returns the bits after queries attended to `entries`, and the weights of each row's last query, 0 without one.

    The query at position p has bit p mod `window`. It has set no bit of an entry that was not cached when it attended.
    On a mesh where devices hold the same kv head, they exchange the group's queries.
    """
    if attended.received is not None:
        return _note(bits, window, entries, attended, attended.received, attended.positions[:, 0], rule)
    last = slice(-window, None)
    queries, lse = (attended.heads.whole_groups(x[:, :, last]) for x in (attended.queries, attended.lse))

    def note(found: tuple[Array, Array], row: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        query, sums, position = row
        weights = window_scores(
            query[:, :, None],
            entries.keys,
            position[:, None],
            entries.positions,
            bias=entries.bias,
            lse=sums[:, :, None],
            **attended.layer.logits,
            reduction=MEAN,
        )
        return _note(found[0], window, entries, attended, weights, position, rule), None

    rows = jnp.moveaxis(queries, 2, 0), jnp.moveaxis(lse, 2, 0), attended.positions[:, last].T
    return jax.lax.scan(note, (bits, jnp.zeros(entries.positions.shape, jnp.float32)), rows)[0]


def _note(
    bits: UInt32[Array, "B H window/32 M"],
    window: int,
    entries: Slots,
    attended: Attended,
    weights: Float[Array, "B H M"],
    position: Int[Array, "B"],
    rule: Rule,
) -> tuple[UInt32[Array, "B H window/32 M"], Float[Array, "B H M"]]:
    """Returns the bits with those of one query in each row, which saw the entries that are not newer than it."""
    at = position[:, None, None]
    seen: Bool[Array, "B H M"] = (entries.positions >= 0) & (entries.positions <= at)
    if attended.window is not None:
        seen &= entries.positions > at - attended.window
    new = rule(weights * jnp.sum(seen, axis=-1, keepdims=True), seen)
    index = (position % window)[:, None, None, None]
    own = (jnp.arange(bits.shape[2])[:, None] == index // WORD) & (at >= 0)[..., None]
    bit = jnp.where(own, jnp.uint32(1) << (index % WORD).astype(jnp.uint32), jnp.uint32(0))
    return (bits & ~bit) | jnp.where(new[:, :, None], bit, jnp.uint32(0)), weights
