"""Pages of a pool: where segments begin, and how their rows are written and moved. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.pallas_kernels import PAGE, pages


def whole_pages(rows: Any) -> Any:
    """Returns the number of rows, an integer or an array, rounded up to whole pages."""
    return (rows + PAGE - 1) // PAGE * PAGE


def starts(size: tuple[Int[Array, "B H"], ...], lanes: int) -> tuple[Int[Array, "B H"], ...]:
    """Returns the first row of each segment, where segments follow one another in each lane: by layer, then by head."""
    in_order = _in_order(size, lanes)
    B, H = size[0].shape
    start = (jnp.cumsum(in_order, axis=-1) - in_order).reshape(B, lanes, len(size), H // lanes)
    return tuple(start[:, :, i].reshape(B, H) for i in range(len(size)))


def _in_order(each: tuple[Int[Array, "B H"], ...], lanes: int) -> Int[Array, "B P n"]:
    """Returns the segments of each lane in their order."""
    B, H = each[0].shape
    return jnp.stack([x.reshape(B, lanes, H // lanes) for x in each], axis=2).reshape(B, lanes, -1)


@dataclass(frozen=True)
class PutPages:
    """Writes the pages of one layer's segments into an array [B, P, T, ...] of a pool.

    Attributes:
        lane: of each head, [H, 1].
        page: to write to, [B, H, n].
        inside: whether it belongs to the head's segment, [B, H, n]. Others are dropped.
    """

    lane: Array
    page: Array
    inside: Array

    def __call__(self, x: Array, new: Array) -> Array:
        B, H, n = self.page.shape
        row = jnp.where(self.inside, self.page * PAGE, x.shape[2])  # rows past the end are dropped
        at = jnp.broadcast_arrays(jnp.arange(B)[:, None, None], self.lane, row)
        whole = tuple(range(3, x.ndim + 1))
        # A scatter of windows of PAGE rows. Of an array in pages, which is a reshape, XLA's CPU backend lays out the
        # result otherwise if there is a single lane, and copies the whole pool.
        return jax.lax.scatter(
            x,
            jnp.stack(at, axis=-1),
            new.reshape(B, H, n, PAGE, *x.shape[3:]),
            jax.lax.ScatterDimensionNumbers(
                update_window_dims=whole, inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 2)
            ),
            unique_indices=True,
            mode="drop",
        )


@dataclass(frozen=True)
class MovePages:
    """Moves every segment of an array [B, P, T, ...] to a new start; rows that no segment had are filled.

    Attributes:
        source: the page that each new page comes from, [B, P, n].
        kept: whether there is one, [B, P, n].
    """

    source: Array
    kept: Array

    @classmethod
    def of(
        cls,
        old: tuple[Int[Array, "B H"], ...],
        new: tuple[Int[Array, "B H"], ...],
        size: tuple[Int[Array, "B H"], ...],
        shape: tuple[int, ...],
        rows: int,
    ) -> MovePages:
        """Plans the move from old starts to new ones.

        Args:
            size: of the segments before.
            shape: [B, P, T] of the pool before.
            rows: T of the pool after it.
        """
        P = shape[1]
        page = jnp.arange(rows // PAGE)
        before, after, sizes = (_in_order(x, P) // PAGE for x in (old, new, size))
        segment = jnp.sum(page[:, None] >= after[:, :, None], axis=-1) - 1
        offset = page - jnp.take_along_axis(after, segment, axis=-1)
        return cls(
            source=jnp.take_along_axis(before, segment, axis=-1) + offset,
            kept=offset < jnp.take_along_axis(sizes, segment, axis=-1),
        )

    def __call__(self, x: Array, fill: int = 0) -> Array:
        B, P = x.shape[:2]
        moved = pages(x, jnp.arange(P)[:, None], self.source)
        kept = self.kept.reshape(*self.kept.shape, *(1,) * (moved.ndim - 3))
        return jnp.where(kept, moved, jnp.asarray(fill, x.dtype)).reshape(B, P, -1, *x.shape[3:])
