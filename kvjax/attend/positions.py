"""Computes positions of tokens, places of entries, their rotations, and the entries that a sliding window sees."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.models import AttentionLayer, rotate
from kvjax.policy import Moment, Policy


def positions_behind(length: Int[Array, "B"], lengths: Int[Array, "B"], size: int) -> Int[Array, "B N"]:
    """Returns the positions of up to N right-aligned tokens per row that follow a cache's tokens; -1 for padding.

    Args:
        length: the number of tokens that each row of the cache has had.
        lengths: the number of tokens that come to each row.
        size: N.
    """
    behind = jnp.arange(size - 1, -1, -1)
    end = length + lengths
    return jnp.where(behind < lengths[:, None], end[:, None] - 1 - behind, -1)


def rotated(
    layer: AttentionLayer,
    x: Float[Array, "B H N D"],
    positions: Int[Array, "B #H N"],
    rope: Float[Array, "B C/2"] | None,
) -> Float[Array, "B H N D"]:
    """Applies RoPE to queries or keys; `rope` has each row's frequencies if they depend on the row's length."""
    return rotate(x, positions, layer.rope.frequencies_of(x.shape[-1], rope), layer.rope.attention_factor)


def places(positions: Int[Array, "B H M"]) -> Int[Array, "B H M"]:
    """Returns the place of each token among the entries by position; past the last one for empty slots."""
    last = jnp.iinfo(jnp.int32).max
    return jnp.argsort(jnp.argsort(jnp.where(positions < 0, last, positions), axis=-1), axis=-1)


def met_keys(policy: Policy, entries: Slots, moment: Moment) -> Float[Array, "B H M D"] | None:
    """Returns the keys rotated to their places if the score keeps queries that saw them so; None if it does not.

    It is called before the entries of a sliding window expire, which would move the others to other places.
    """
    if policy.positions != "in_cache" or not policy.score.needs.keeps_queries:
        return None
    return rotated(moment.layer, entries.plain().keys, places(entries.positions), moment.rope)


def expired(entries: Slots, moment: Moment, incoming: Bool[Array, "B"]) -> Slots:
    """Empties the slots of a sliding-window layer whose token no later query can see, in rows that go on."""
    if moment.window is None:
        return entries
    gone = entries.positions <= moment.next_position[:, None, None] - moment.window
    gone &= incoming[:, None, None]
    return replace(entries, positions=jnp.where(gone, -1, entries.positions))
