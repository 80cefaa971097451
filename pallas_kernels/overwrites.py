"""Writes of a few numbers into a large state at every step, in plain XLA: by a pass over the state, or by a scatter.

A scatter touches nothing else, and a GPU or TPU runs all of it at once. A CPU runs a scatter as a loop over its
indices, and compiles a kernel for each, but one kernel for equal passes. On a GPU a scatter is a kernel of its own, and
a pass becomes a part of another kernel, so that a pass over a small state is cheaper there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

SMALL = 1 << 19  # numbers; reading and writing them takes a GPU of 3 TB/s about as long as launching a kernel


def _written(
    by_pass: Callable[..., Array], by_scatter: Callable[..., Array], x: Array, *arrays: Array, fuses: bool = True
) -> Array:
    """Runs the form of the platform. `fuses` tells whether the pass can be a part of another kernel of a GPU."""
    cuda = by_pass if fuses and x.size <= SMALL else by_scatter
    return jax.lax.platform_dependent(x, *arrays, cpu=by_pass, cuda=cuda, default=by_scatter)


def set_slot(
    x: Shaped[Array, "B H *state S"], slot: Int[Array, "B H"], new: Shaped[Array, "B H *state"] | int
) -> Shaped[Array, "B H *state S"]:
    """Writes one slot of each row and head; none where `slot` is S."""
    state = x.shape[2:-1]

    def by_pass(x: Array, slot: Array, new: Array) -> Array:
        return jnp.where(jnp.arange(x.shape[-1]) == jnp.expand_dims(slot, range(2, x.ndim)), new[..., None], x)

    def by_scatter(x: Array, slot: Array, new: Array) -> Array:
        # The scatter writes single numbers. If it wrote the state of a slot at once, XLA would lay that state out along
        # a TPU's lanes without filling them: 8 numbers per slot would take the memory and the time of 128.
        b, h = _rows_and_heads(slot)
        rows, heads, slots = (jnp.expand_dims(i, range(i.ndim, i.ndim + len(state))) for i in (b, h, slot))
        within = jnp.indices(state, sparse=True)
        return x.at[rows, heads, *within, slots].set(new, mode="drop", unique_indices=True)

    return _written(by_pass, by_scatter, x, slot, jnp.broadcast_to(jnp.asarray(new, x.dtype), slot.shape + state))


def set_entries(
    x: Shaped[Array, "B H N *D"], index: Int[Array, "B n"], new: Shaped[Array, "B H n *D"]
) -> Shaped[Array, "B H N *D"]:
    """Writes `new` to the same n of N entries in all heads of a row. An index of N is dropped."""
    one = new.shape[2] == 1

    def by_pass(x: Array, index: Array, new: Array) -> Array:
        at = index[:, None] == jnp.arange(x.shape[2])[:, None]  # [B, N, n]
        rows = (len(at), 1, -1, *(1,) * (x.ndim - 3))
        if not one:
            source = jnp.sum(jnp.where(at, jnp.arange(new.shape[2]), 0), axis=-1)
            new = jnp.take_along_axis(new, source.reshape(rows), axis=2, mode="promise_in_bounds")
        return jnp.where(jnp.any(at, axis=-1).reshape(rows), new, x)

    def by_scatter(x: Array, index: Array, new: Array) -> Array:
        b, h = _rows_and_heads(x)
        return x.at[b[..., None], h[:, None], index[:, None]].set(new, mode="drop", unique_indices=True)

    return _written(by_pass, by_scatter, x, index, new, fuses=one)


def change_block(
    x: Shaped[Array, "B H N S"], block: Int[Array, "B"], change: Callable[[Array], Array]
) -> Shaped[Array, "B H N S"]:
    """Applies `change`, which works elementwise on [B, H, n, S], to one of N blocks of each row; to none if it is N."""

    def by_pass(x: Array, block: Array) -> Array:
        own = jnp.arange(x.shape[2]) == block[:, None]
        return jnp.where(own[:, None, :, None], change(x), x)

    def by_scatter(x: Array, block: Array) -> Array:
        b, h = _rows_and_heads(x)
        at = b, h, block[:, None]
        changed = jnp.squeeze(change(x[at][:, :, None]), 2)
        return x.at[at].set(changed, mode="drop", unique_indices=True)

    return _written(by_pass, by_scatter, x, block)


def _rows_and_heads(x: Array) -> tuple[Int[Array, "B 1"], Int[Array, "H"]]:
    """Indices of a scatter head by head.

    Writing all heads of a row at once makes XLA lay the array out entry-major on TPUs, and transpose it around loops.
    """
    return jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
