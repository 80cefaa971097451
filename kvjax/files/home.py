"""Paths as published pages and files state them: with ~ for the home folder, which nobody else has."""

from __future__ import annotations

import shlex
from pathlib import Path


def from_home(text: str) -> str:
    """Returns a path with ~ for the home folder; any other text as it is."""
    try:
        return f"~/{Path(text).relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return text


def path_word(text: str) -> str:
    """Returns a path as a word of a command, from the home folder on if it is there."""
    path = from_home(text)
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
