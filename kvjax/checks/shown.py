"""Values in messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
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


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known: the nearest names as a question, or nothing."""
    names = {one.lower(): one for one in known}
    near = [names[one] for one in get_close_matches(str(name).lower()[:MOST], names, n=3)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def system_error(error: OSError) -> str:
    """An error of the operating system in words: the file, what is wrong with it, and what is accepted."""
    if error.strerror is None or error.filename is None:
        return error.strerror or str(error)
    for kind, words in _OF_FILES.items():
        if isinstance(error, kind):
            return f"{error.filename} {words}"
    return f"{error.filename}: {error.strerror.lower()}"


_OF_FILES: dict[type[OSError], str] = {
    FileNotFoundError: "does not exist: expected a file or folder that does",
    FileExistsError: "exists and is a file: expected a folder, or a path where nothing is",
    IsADirectoryError: "is a folder: expected a file",
    NotADirectoryError: "is in or below a file: expected a folder there",
    PermissionError: "is not permitted to this user: expected a file or folder that is",
}


def counted(count: int, noun: str) -> str:
    """A number of things as text: '1 row', '1,024 rows'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def bytes_text(count: float) -> str:
    """A number of bytes as text, in powers of 1000: 12345678 becomes '12.3 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{f'{count:#.3g}'.rstrip('.')} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def installs(extra: str) -> str:
    """The command that installs the packages of an extra, for messages: it names them, wherever kvjax came from."""
    try:
        stated = [text.partition(";") for text in metadata.requires("kvjax") or ()]
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        stated = []
    quotes = str.maketrans("'", '"')
    packages = [name.strip() for name, _, marker in stated if f'extra == "{extra}"' in marker.translate(quotes)]
    named = " ".join(f'"{package}"' for package in packages)
    return f"pip install {named} (the extra {extra})" if named else f'pip install ".[{extra}]" in a checkout of kvjax'
