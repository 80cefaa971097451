"""Writing a few numbers into a large state at every step, in the way that a device is good at.

A scatter touches nothing else, and a GPU or TPU does all of it at once. A CPU runs it as a loop over its indices, next
to which a pass over the whole state is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

SINGLY = 16


def clear_slot(x: Shaped[Array, "B H *state S"], slot: Int[Array, "B H"]) -> Shaped[Array, "B H *state S"]:
    """Zeros in one slot of each row and head, in none where `slot` is S."""
    return jax.lax.platform_dependent(x, slot, cpu=clear_by_pass, default=clear_by_scatter)


def set_slots(
    x: Shaped[Array, "B P S *D"], at: tuple[Array, Array, Array], new: Shaped[Array, "B H *D"] | int
) -> Shaped[Array, "B P S *D"]:
    """`new` in these slots, of which those beyond the last are none.

    Few numbers a slot, such as scales, are written one by one, for the reason that `clear_by_scatter` gives.
    """
    index: tuple[Array, ...] = at
    if x.ndim == 4 and x.shape[3] <= SINGLY:
        index = *(i[..., None] for i in at), jnp.arange(x.shape[3])
    return x.at[index].set(new, mode="drop", unique_indices=True)


def set_entries(
    x: Shaped[Array, "B H N *D"], index: Int[Array, "B n"], new: Shaped[Array, "B H n *D"]
) -> Shaped[Array, "B H N *D"]:
    """`new` in the same n of N entries of all heads of a row, of which those that are N are none."""
    return jax.lax.platform_dependent(x, index, new, cpu=set_by_row, default=set_by_head)


def change_block(
    x: Shaped[Array, "B H N S"], block: Int[Array, "B"], change: Callable[[Array], Array]
) -> Shaped[Array, "B H N S"]:
    """`change` of one of N blocks of each row, of none where `block` is N. It works entry by entry, on [B, H, n, S]."""
    by_pass, by_scatter = (partial(f, change=change) for f in (change_by_pass, change_by_scatter))
    return jax.lax.platform_dependent(x, block, cpu=by_pass, default=by_scatter)


def clear_by_pass(x: Array, slot: Array) -> Array:
    return jnp.where(jnp.arange(x.shape[-1]) == jnp.expand_dims(slot, range(2, x.ndim)), 0, x)


def clear_by_scatter(x: Array, slot: Array) -> Array:
    # By single entries. If a slot's state were written as a whole, a TPU would hold it along its lanes, and not fill
    # them: a state of 8 numbers a slot then takes as much memory, and time, as 128.
    b, h = jnp.arange(slot.shape[0])[:, None], jnp.arange(slot.shape[1])
    rows, heads, slots = (jnp.expand_dims(i, range(i.ndim, i.ndim + x.ndim - 3)) for i in (b, h, slot))
    within = jnp.indices(x.shape[2:-1], sparse=True)
    return x.at[rows, heads, *within, slots].set(0, mode="drop", unique_indices=True)


def set_by_row(x: Array, index: Array, new: Array) -> Array:
    b = jnp.arange(x.shape[0])[:, None]
    return x.at[b, :, index].set(jnp.swapaxes(new, 1, 2), mode="drop", unique_indices=True)


def set_by_head(x: Array, index: Array, new: Array) -> Array:
    # All of a row's heads at once, a TPU would hold with the entry before the head, and turn what a loop is given.
    b, h = jnp.arange(x.shape[0])[:, None, None], jnp.arange(x.shape[1])[:, None]
    return x.at[b, h, index[:, None]].set(new, mode="drop", unique_indices=True)


def change_by_pass(x: Array, block: Array, change: Callable[[Array], Array]) -> Array:
    own = jnp.arange(x.shape[2]) == block[:, None]
    return jnp.where(own[:, None, :, None], change(x), x)


def change_by_scatter(x: Array, block: Array, change: Callable[[Array], Array]) -> Array:
    # Head by head, for the reason that `set_by_head` gives.
    b, h, block = jnp.arange(block.shape[0])[:, None], jnp.arange(x.shape[1]), block[:, None]
    changed = jnp.squeeze(change(x[b, h, block][:, :, None]), 2)
    return x.at[b, h, block].set(changed, mode="drop", unique_indices=True)
