"""Writes of a few numbers into a large state at every step, in the form that each device runs fast.

A scatter touches nothing else, and a GPU or TPU runs all of it at once. A CPU runs a scatter as a loop over its
indices, so that a pass over the whole state is cheaper there. On a GPU a scatter is a kernel of its own, and a pass
becomes a part of another kernel, so that a pass over a small state is cheaper there too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.pallas_kernels import set_slots

SMALL = 1 << 19  # numbers; reading and writing them takes a GPU of 3 TB/s about as long as launching a kernel


def clear_slot(x: Shaped[Array, "B H *state S"], slot: Int[Array, "B H"]) -> Shaped[Array, "B H *state S"]:
    """Clears one slot of each row and head; none where `slot` is S."""
    small = clear_by_pass if x.size <= SMALL else clear_by_scatter
    return jax.lax.platform_dependent(x, slot, cpu=clear_by_pass, cuda=small, default=clear_by_scatter)


def set_slot(x: Shaped[Array, "B H S"], slot: Int[Array, "B H"], new: Shaped[Array, "B H"]) -> Shaped[Array, "B H S"]:
    """Writes one slot of each row and head; none where `slot` is S."""

    def by_pass(x: Array, slot: Array, new: Array) -> Array:
        return jnp.where(jnp.arange(x.shape[-1]) == slot[..., None], new[..., None], x)

    def by_scatter(x: Array, slot: Array, new: Array) -> Array:
        return set_slots(x, (jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1]), slot), new)

    small = by_pass if x.size <= SMALL else by_scatter
    # A CPU needs as long for either. XLA compiles one kernel for equal passes there, but one kernel for each scatter.
    return jax.lax.platform_dependent(x, slot, new, cpu=small, cuda=small, default=by_scatter)


def set_entries(
    x: Shaped[Array, "B H N *D"], index: Int[Array, "B n"], new: Shaped[Array, "B H n *D"]
) -> Shaped[Array, "B H N *D"]:
    """Writes `new` to the same n of N entries in all heads of a row. An index of N is dropped."""
    one = new.shape[2] == 1
    small = set_by_pass if one and x.size <= SMALL else set_by_head
    # A prompt sets many entries. XLA compiles one kernel for equal gathers on a CPU, but one kernel for each scatter.
    cpu = set_by_row if one else set_by_gather
    return jax.lax.platform_dependent(x, index, new, cpu=cpu, cuda=small, default=set_by_head)


def change_block(
    x: Shaped[Array, "B H N S"], block: Int[Array, "B"], change: Callable[[Array], Array]
) -> Shaped[Array, "B H N S"]:
    """Applies `change`, which works elementwise on [B, H, n, S], to one of N blocks of each row; to none if it is N."""
    by_pass, by_scatter = (partial(f, change=change) for f in (change_by_pass, change_by_scatter))
    small = by_pass if x.size <= SMALL else by_scatter
    return jax.lax.platform_dependent(x, block, cpu=by_pass, cuda=small, default=by_scatter)


def clear_by_pass(x: Array, slot: Array) -> Array:
    return jnp.where(jnp.arange(x.shape[-1]) == jnp.expand_dims(slot, range(2, x.ndim)), 0, x)


def clear_by_scatter(x: Array, slot: Array) -> Array:
    # The scatter writes single numbers. If it wrote the state of a slot at once, XLA would lay that state out along a
    # TPU's lanes without filling them: 8 numbers per slot would take the memory and the time of 128.
    b, h = jnp.arange(slot.shape[0])[:, None], jnp.arange(slot.shape[1])
    rows, heads, slots = (jnp.expand_dims(i, range(i.ndim, i.ndim + x.ndim - 3)) for i in (b, h, slot))
    within = jnp.indices(x.shape[2:-1], sparse=True)
    return x.at[rows, heads, *within, slots].set(0, mode="drop", unique_indices=True)


def set_by_row(x: Array, index: Array, new: Array) -> Array:
    b = jnp.arange(x.shape[0])[:, None]
    return x.at[b, :, index].set(jnp.swapaxes(new, 1, 2), mode="drop", unique_indices=True)


def set_by_gather(x: Array, index: Array, new: Array) -> Array:
    at = index[:, None] == jnp.arange(x.shape[2])[:, None]  # [B, N, n]
    source = jnp.sum(jnp.where(at, jnp.arange(new.shape[2]), 0), axis=-1)
    rows = (len(at), 1, -1, *(1,) * (x.ndim - 3))
    taken = jnp.take_along_axis(new, source.reshape(rows), axis=2, mode="promise_in_bounds")
    return jnp.where(jnp.any(at, axis=-1).reshape(rows), taken, x)


def set_by_pass(x: Array, index: Array, new: Array) -> Array:
    own = jnp.arange(x.shape[2]) == index
    return jnp.where(own.reshape(own.shape[0], 1, -1, *(1,) * (x.ndim - 3)), new, x)


def set_by_head(x: Array, index: Array, new: Array) -> Array:
    # Writing all heads of a row at once makes XLA lay the array out entry-major on TPUs, and transpose it around loops.
    b, h = jnp.arange(x.shape[0])[:, None, None], jnp.arange(x.shape[1])[:, None]
    return x.at[b, h, index[:, None]].set(new, mode="drop", unique_indices=True)


def change_by_pass(x: Array, block: Array, change: Callable[[Array], Array]) -> Array:
    own = jnp.arange(x.shape[2]) == block[:, None]
    return jnp.where(own[:, None, :, None], change(x), x)


def change_by_scatter(x: Array, block: Array, change: Callable[[Array], Array]) -> Array:
    # It writes head by head, for the reason that `set_by_head` gives.
    b, h, block = jnp.arange(block.shape[0])[:, None], jnp.arange(x.shape[1]), block[:, None]
    changed = jnp.squeeze(change(x[b, h, block][:, :, None]), 2)
    return x.at[b, h, block].set(changed, mode="drop", unique_indices=True)


def mark(index: Int[Array, "B H K"], size: int) -> Bool[Array, "B H size"]:
    """True at the given indices; an index outside of 0 .. size - 1 is dropped."""
    if index.shape[2] == 1:  # a comparison, which other passes include
        return jnp.arange(size) == index
    b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
    unmarked = jnp.zeros((*index.shape[:2], size), bool)
    return unmarked.at[b, h, jnp.where(index < 0, size, index)].set(True, mode="drop")
