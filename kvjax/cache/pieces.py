"""Walks over segments a piece at a time, to find the entries that leave and to let a score observe.

Every loop reads the rows of the longest segment and no more. A policy that cannot judge pieces gets whole segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.pallas_kernels import PAGE

from .entries import MakeRoom, Take
from .paging import whole_pages
from .slots import Slots, mark

if TYPE_CHECKING:
    from .segments import Segments

PIECE = 16 * PAGE  # the rows of each segment that are judged or shown at once


def evicted(pool: Segments, i: int, incoming: Bool[Array, "B"], room: MakeRoom) -> tuple[Segments, Int[Array, "B H"]]:
    """Evicts `room.count` entries from each full head of layer i. Returns the pool and an empty row per segment."""
    count, beyond = room.count, pool.positions.shape[2]
    length = _length(pool, room)
    pieces = (jnp.max(pool.size[i]) + length - 1) // length
    none = jnp.full(pool.used[i].shape, beyond)

    def survey(j: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """Counts entries and finds the first empty row."""
        occupancy, first = found
        entries, slots = _piece(pool, i, j, length, room)
        return occupancy + entries.occupancy, jnp.minimum(first, _first_empty(pool, i, entries, slots))

    occupancy, first = jax.lax.fori_loop(0, pieces, survey, (jnp.zeros_like(none), none))
    full = (occupancy >= pool.capacity[i]) & incoming[:, None]

    def judge(j: Array, worst: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Keeps the lowest scores of the pieces so far."""
        entries, slots = _piece(pool, i, j, length, room)
        new = (room.judge(entries), entries.positions, jnp.broadcast_to(slots, entries.positions.shape))
        scores, positions, slots = (jnp.concatenate(pair, axis=-1) for pair in zip(worst, new, strict=True))
        victims = room.victims(scores, positions)

        def pick(x: Array, missing: float | int) -> Array:
            return jnp.take_along_axis(x, victims, axis=-1, mode="fill", fill_value=missing)

        return pick(scores, jnp.inf), pick(positions, -1), pick(slots, beyond)

    begin = (
        jnp.full((*none.shape, count), jnp.inf),
        jnp.full((*none.shape, count), -1, jnp.int32),
        jnp.full((*none.shape, count), beyond, jnp.int32),
    )
    _, _, victims = jax.lax.fori_loop(0, jnp.where(jnp.any(full), pieces, 0), judge, begin)
    victims = jnp.where(full[..., None], victims, none[..., None])
    if not room.absorbs:
        return pool.drop(i, victims), jnp.minimum(first, jnp.min(victims, axis=-1))
    entries, slots = _piece(pool, i, jnp.int32(0), length, room)
    entries = room.release(entries, mark(victims, length))  # other entries than the victims may leave
    return pool.with_layer(i, entries), _first_empty(pool, i, entries, slots)


def first_free(pool: Segments, i: int, room: MakeRoom) -> Int[Array, "B H"]:
    """Returns the first row of each segment of layer i that is empty or holds an entry that no later query can see.

    Without a sliding window it is the row behind the used ones. Of as many rows as a window has tokens, one is free
    when a token comes in.
    """
    if room.window is None:
        return pool.used[i]
    length = min(whole_pages(room.window), pool.positions.shape[2])
    return _first_empty(pool, i, *_piece(pool, i, jnp.int32(0), length, room))


def observed(pool: Segments, i: int, show: Callable[[Slots, Take], tuple[Any, Any]], room: MakeRoom) -> Segments:
    """Stores the state that `show` returns for each piece of layer i. State per row is the same for each."""
    before, length = pool.per_row[i], _length(pool, room)

    def show_piece(j: Array, pool: Segments) -> Segments:
        entries, _ = _piece(pool, i, j, length, room)
        entries = replace(entries.plain(), per_row=before)
        per_slot, per_row = show(entries, partial(pool.take, i, j * (length // PAGE), length))
        return pool.with_state(i, j * (length // PAGE), replace(entries, per_slot=per_slot, per_row=per_row))

    if not jax.tree.leaves(pool.per_slot):
        return show_piece(jnp.int32(0), pool)
    pieces = (jnp.max(pool.used[i]) + length - 1) // length
    return jax.lax.fori_loop(0, jnp.maximum(pieces, 1), show_piece, pool)


def _length(pool: Segments, room: MakeRoom) -> int:
    """Returns the rows of a piece: all of the longest segment where entries cannot be judged in pieces."""
    if room.piecewise:
        return PIECE
    return pool.positions.shape[2] if pool.longest is None else pool.longest


def _piece(pool: Segments, i: int, j: Array, length: int, room: MakeRoom) -> tuple[Slots, Int[Array, "length"]]:
    """Returns piece j of every segment of layer i, without entries that no later query can see, and its rows."""
    entries = pool.view(i, j * (length // PAGE), length)
    return room.renew(entries), j * length + jnp.arange(length)


def _first_empty(pool: Segments, i: int, entries: Slots, slots: Int[Array, "length"]) -> Int[Array, "B H"]:
    """Returns the first empty row of a piece in each segment of layer i; T where there is none."""
    empty, beyond = (entries.positions < 0) & (slots < pool.size[i][..., None]), pool.positions.shape[2]
    return jnp.min(jnp.where(empty, slots, beyond), axis=-1)
