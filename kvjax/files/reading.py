"""Reads files that users name. One that may have no end, or is far too large, is refused instead of read for ever."""

from __future__ import annotations

import os
from pathlib import Path

from kvjax.checks import bytes_text

MOST = 2**30  # bytes


def read_bytes(path: str | os.PathLike[str], most: int = MOST, expected: str = "a file") -> bytes:
    """The bytes of a file or pipe, of which no more than `most` are read.

    Args:
        path: the file.
        most: the largest number of bytes.
        expected: what is accepted, for the messages.

    Raises:
        ValueError: the path is a device, or holds more than `most` bytes.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.is_char_device() or path.is_block_device():  # which may have no end
        raise ValueError(f"{path} is a device: expected {expected}")
    with path.open("rb") as file:
        data = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if data is None or len(data) > most:
        raise ValueError(f"{path} is too large: expected {expected} of at most {bytes_text(most)}")
    return data


def read_text(path: str | os.PathLike[str], most: int = MOST, expected: str = "a file") -> str:
    """The text of a file in UTF-8, whose line ends become \\n. Arguments and errors are those of `read_bytes`."""
    try:
        text = read_bytes(path, most, expected).decode("utf-8-sig")  # some programs write a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; expected {expected} in UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
