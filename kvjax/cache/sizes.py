"""Sizes in slots and tokens: few of them, so that few programs serve all lengths. Integers only."""

from __future__ import annotations

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


def room_for(max_new_tokens: int) -> int:
    """Returns the number of slots set aside for an answer of up to `max_new_tokens` tokens."""
    return -(-max_new_tokens // ROOM_STEP) * ROOM_STEP
