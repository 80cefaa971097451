"""Paths as published pages and files state them: with ~ for the home folder, which nobody else has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any


def from_home(text: str) -> str:
    """Returns a path with ~ for the home folder; any other text as it is."""
    try:
        return f"~/{Path(text).relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return text


def without_home(value: Any) -> Any:
    """Returns a value of JSON with ~ for the home folder wherever a text names a path in it."""
    if isinstance(value, dict):
        return {without_home(name): without_home(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_home(x) for x in value]
    home = f"{Path.home()}/"
    return value.replace(home, "~/") if isinstance(value, str) and home != "//" else value


def path_word(text: str) -> str:
    """Returns a path as a word of a command, from the home folder on if it is there."""
    path = from_home(text)
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
