"""Checksums of the files of a folder, in `SHA256SUMS`, which `sha256sum --check` reads too."""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)\n")


def write_checksums(folder: Path) -> None:
    """Writes the checksums of all files in a folder. Raises OSError if it cannot."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = _sums(folder, [name for name in found if name != NAME])
    text = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    (folder / NAME).write_bytes(text.encode())


def damages(folder: Path, owned: re.Pattern[str]) -> list[str]:
    """Lists what is not as `write_checksums` found it, one sentence each.

    Args:
        folder: the folder.
        owned: matches the files, relative to the folder and with forward slashes, that must have a checksum.
    """
    try:
        lines = (folder / NAME).read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return [f"it has no {NAME} that can be read"]
    matches = list(map(_LINE.fullmatch, lines))
    saved = {match[2]: match[1] for match in matches if match is not None}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    changed = [name for name, digest in _sums(folder, sorted(there & saved.keys())).items() if digest != saved[name]]
    return [
        *([f"{NAME} is damaged"] if None in matches else []),
        *(f"{name} is missing" for name in sorted(saved.keys() - there)),
        *(f"{name} is not what was saved" for name in changed),
        *(f"{name} has no checksum" for name in sorted(there - saved.keys() - {NAME}) if owned.fullmatch(name)),
    ]


def _sums(folder: Path, names: list[str]) -> dict[str, str]:
    """The checksum of each file, in hexadecimal digits."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing holds no lock of Python
        return dict(zip(names, pool.map(digest, names), strict=True))
