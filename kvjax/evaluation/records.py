"""The results file of a run: one JSON line per answer, appended as soon as the answer exists.

A run that was killed continues where it stopped. At its end, `results.jsonl` has each planned line once, in the planned
order. The file is therefore identical, byte by byte, to that of an uninterrupted run. Times and dates differ from run
to run and are in `timings.jsonl`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kvjax.writing import new_file

Key: TypeAlias = tuple[Any, ...]
KEY = ("policy", "budget", "question", "task", "length", "id", "asked")


def key_of(line: Mapping[str, Any]) -> Key:
    """The fields that identify a line; they are unique within a run."""
    return tuple(line[name] for name in KEY)


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as JSON in UTF-8, with its line end."""
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


class Records:
    """A context manager for the results file. Only one process at a time can open the file.

    A line with an `error` counts as missing when the file is opened again, so that its question is asked again.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        """Opens or creates the file. Drops lines that are incomplete, as after a kill, with a notice to `say`.

        Raises:
            ValueError: if another process has the file open.
        """
        self._path = path
        self._lock = path.with_name(f".{path.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"another run is writing {path}: expected one run at a time") from None
        self._file = path.open("a+b")
        self._at: dict[Key, tuple[int, int]] = {}
        self._failed: set[Key] = set()
        self._order: list[Key] = []
        self._repair(say)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._at and key not in self._failed

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends the lines that the file lacks, in one write."""
        new = [line for line in lines if key_of(line) not in self]
        at = self._file.seek(0, os.SEEK_END)
        written = [encoded(line) for line in new]
        self._file.write(b"".join(written))
        self._file.flush()
        for line, data in zip(new, written, strict=True):
            self._enter(line, at, len(data))
            at += len(data)

    def finish(self, order: Iterable[Key]) -> None:
        """Sorts the file so that it has each line once. Lines of an earlier, larger run follow at the end."""
        planned = [key for key in order if key in self._at]
        known = set(planned)
        wanted = planned + [key for key in self._at if key not in known]
        if wanted != self._order:
            self._rewrite([self._line(key) for key in wanted])
            self._order = wanted

    def _line(self, key: Key) -> bytes:
        at, size = self._at[key]
        self._file.seek(at)
        return self._file.read(size)

    def _enter(self, line: Mapping[str, Any], at: int, size: int) -> None:
        key = key_of(line)
        self._at[key] = at, size
        self._order.append(key)
        (self._failed.add if "error" in line else self._failed.discard)(key)

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Replaces the file atomically by one with these lines."""
        with new_file(self._path) as new, new.open("wb") as file:
            file.writelines(lines)
        self._file.close()
        self._file = self._path.open("a+b")

    def _repair(self, say: Callable[[str], None]) -> None:
        self._file.seek(0)
        found = self._file.readlines()
        good = []
        for number, data in enumerate(found, 1):
            line = read_line(data)
            if line is None:
                say(f"{self._path}: line {number} of {len(found)} is incomplete; its question is asked again")
            else:
                good.append((line, data))
        if len(good) < len(found):
            self._rewrite(data for _, data in good)
        at = 0
        for line, data in good:
            self._enter(line, at, len(data))
            at += len(data)


def read_line(data: bytes) -> dict[str, Any] | None:
    """Parses a line of the results file; None if the line is incomplete."""
    try:
        line = json.loads(data)
        key_of(line)
    except (ValueError, KeyError, TypeError):
        return None
    return line if data.endswith(b"\n") else None
