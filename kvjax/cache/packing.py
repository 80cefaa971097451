"""Lays the layers of a prompt out in a pool, once it is known how many entries each head retains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .paging import starts, whole_pages
from .segments import Segments
from .sizes import UNLIMITED
from .slots import Slots, slots_third


def planned_pool(layers: Sequence[Slots], *, lanes: int, rows: int, room: int, growing: int) -> Segments:
    """Returns a pool of the shapes that it has with these layers in it, which do not depend on their entries.

    The arguments are those of `empty_pool`.
    """
    capacity = tuple(layer.capacity for layer in layers)
    pool = empty_pool(layers[0], capacity, capacity, lanes=lanes, rows=rows, room=room, growing=growing)
    return replace(
        pool, per_row=tuple(layer.per_row for layer in layers), merging=tuple(layer.merging for layer in layers)
    )


def empty_pool(
    like: Slots,
    capacity: tuple[Int[Array, "B H"], ...],
    used: tuple[Int[Array, "B H"], ...],
    *,
    lanes: int,
    rows: int,
    room: int,
    growing: int,
) -> Segments:
    """Returns a pool whose segments are laid out for layers that are not there yet.

    Args:
        like: a layer, whose entries have the form of all others. Each head's entries are in its first slots.
        capacity: of each head of each layer; UNLIMITED for one that can grow.
        used: the number of entries of each head of each layer.
        lanes: P.
        rows: the number of rows per lane, which must suffice. It is rounded up to whole pages.
        room: the number of slots for tokens to come in each segment that can grow.
        growing: the number of segments per lane that can grow.
    """
    size = tuple(
        whole_pages(jnp.where(most < UNLIMITED, jnp.maximum(most, held), held + room))
        for most, held in zip(capacity, used, strict=True)
    )
    nothing = (None,) * len(size)

    def rows_of(x: Any, fill: int = 0) -> Array:
        return jnp.full((len(size[0]), lanes, whole_pages(rows), *x.shape[3:]), fill, x.dtype)

    return Segments(
        keys=jax.tree.map(rows_of, like.keys),
        values=jax.tree.map(rows_of, like.values),
        positions=rows_of(like.positions, fill=-1),
        start=starts(size, lanes),
        size=size,
        used=used,
        capacity=capacity,
        per_slot=jax.tree.map(lambda x: rows_of(jax.eval_shape(slots_third, x)), like.per_slot),
        per_row=nothing,
        merging=nothing,
        bias=jax.tree.map(rows_of, like.bias),
        growing=growing,
    )
