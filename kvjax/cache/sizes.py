"""Sizes in slots and tokens: few of them, so that few programs serve all lengths. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

UNLIMITED = 2**30
"""A capacity that no prompt reaches."""
ROOM_STEP = 64  # answers are given room in steps of 64 tokens, so that few programs serve all limits


def bucket(size: int) -> int:
    """Returns the padded size for `size` tokens: 16, 24, 32, 48, .., powers of two and the sizes halfway between."""
    power = 16
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def rows_to_grow(room: int, windows: Sequence[int | None], heads: int, growing: int) -> int:
    """Returns the rows that the segments of a lane need at most for `room` more tokens each.

    Args:
        windows: of the layers. A segment of a sliding-window layer needs no more rows than its window.
        heads: the number of segments of each layer.
        growing: how many of all segments grow.
    """
    each = [room if window is None else min(room, window) for window in windows]
    return sum(sorted(each * heads, reverse=True)[:growing])


def room_for(max_new_tokens: int) -> int:
    """Returns the number of slots set aside for an answer of up to `max_new_tokens` tokens."""
    return -(-max_new_tokens // ROOM_STEP) * ROOM_STEP
