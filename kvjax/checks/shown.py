"""Values in messages."""

from __future__ import annotations

from typing import Any

MOST = 200  # characters


def shown(value: Any, most: int = MOST) -> str:
    """The repr of a value, cut after `most` characters, so that a message stays readable whatever was given."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or a class of the caller's
        return f"a value of type {type(value).__name__}"
    return cut(text, most)


def cut(text: str, most: int = MOST) -> str:
    """A text, cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def bytes_text(count: float) -> str:
    """A number of bytes as text, in powers of 1000: 12345678 becomes '12.3 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{f'{count:#.3g}'.rstrip('.')} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
