"""Tiles of sorted rows: each has rows of one group only."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Tiles(NamedTuple):
    """Tiles in the order of their rows. Those from `used` on have no rows.

    Attributes:
        group: the group of each tile.
        first: the first row of each tile.
        end: the row after the last one.
        used: the number of tiles that have rows.
    """

    group: Int[Array, "T"]
    first: Int[Array, "T"]
    end: Int[Array, "T"]
    used: Int[Array, ""]


def tiles_of(sizes: Int[Array, "groups"], rows: int, rows_per_tile: int) -> Tiles:
    """Cuts groups of consecutive rows into tiles. Every group begins a tile.

    Args:
        sizes: the number of rows of each group.
        rows: the most rows of all groups together.
        rows_per_tile: the most rows of a tile.
    """
    most = rows // rows_per_tile + min(len(sizes), rows)
    counts = -(-sizes // rows_per_tile)
    after = jnp.cumsum(counts)
    tile = jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(after, tile, side="right", method="compare_all"), len(sizes) - 1)
    first = (jnp.cumsum(sizes) - sizes)[group] + (tile - (after - counts)[group]) * rows_per_tile
    end = jnp.where(tile < after[-1], jnp.minimum(first + rows_per_tile, jnp.cumsum(sizes)[group]), first)
    return Tiles(*(x.astype(jnp.int32) for x in (group, first, end, after[-1])))
