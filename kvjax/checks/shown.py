"""Values in messages."""

from __future__ import annotations

from typing import Any

MOST = 200  # characters


def shown(value: Any) -> str:
    """The repr of a value, cut after MOST characters, so that a message stays readable whatever was given."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or a class of the caller's
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MOST else f"{text[:MOST]}... ({len(text):,} characters)"
