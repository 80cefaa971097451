"""Lays the layers of a prompt out in a pool, once it is known how many entries each head retains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap
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

    The arguments are those of `empty_pool`. Sliding windows change no shape.
    """
    capacity, windows = tuple(layer.capacity for layer in layers), (None,) * len(layers)
    pool = empty_pool(layers[0], capacity, capacity, windows, lanes=lanes, rows=rows, room=room, growing=growing)
    return replace(
        pool, per_row=tuple(layer.per_row for layer in layers), merging=tuple(layer.merging for layer in layers)
    )


def empty_pool(
    like: Slots,
    capacity: tuple[Int[Array, "B H"], ...],
    used: tuple[Int[Array, "B H"], ...],
    windows: Sequence[int | None],
    *,
    lanes: int,
    rows: int,
    room: int,
    growing: int,
) -> Segments:
    """Returns a pool whose segments are laid out for layers that are not there yet.

    Args:
        like: a layer, whose entries have the form of all others. Each head's entries are in its first slots.
        capacity: of each head of each layer; UNLIMITED for one that grows with the answer.
        used: the number of entries of each head of each layer.
        windows: the sliding window of each layer, beyond which no segment grows.
        lanes: P.
        rows: the number of rows per lane, which must suffice. It is rounded up to whole pages.
        room: the number of slots for tokens to come in each segment that grows.
        growing: the number of segments per lane that grow.
    """

    def laid_out(most: Array, held: Array, window: int | None) -> tuple[Array, Array]:
        """Returns the capacity and the size of a layer's segments."""
        bound = most if window is None else jnp.minimum(most, jnp.maximum(window, held))
        rows = jnp.where(most < UNLIMITED, jnp.maximum(bound, held), jnp.minimum(bound, held + room))
        return bound, whole_pages(rows)

    capacity, size = zip(*starmap(laid_out, zip(capacity, used, windows, strict=True)), strict=True)
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
