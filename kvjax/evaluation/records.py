"""The results of a run on disk: one JSON line an answer, as soon as there is one.

A run that was killed goes on where it stopped. When it has ended, `results.jsonl` has each planned line once and in the
planned order, and so is the same file byte by byte as that of a run that was never interrupted. What differs from run
to run, times and dates, is in `timings.jsonl` beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Key: TypeAlias = tuple[Any, ...]
KEY = ("policy", "budget", "question", "task", "length", "id", "asked")


def key_of(line: Mapping[str, Any]) -> Key:
    """What a line is about; no two lines of a run are about the same."""
    return tuple(line[name] for name in KEY)


def encoded(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


class Records:
    """A file of lines that is added to. Use it as a context; one process at a time may.

    Lines with an `error` count as missing when the file is opened again, so that what failed is tried again.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        """Opens the file, or begins it. What is no JSON line, as after a kill, is dropped with a notice to `say`.

        Raises ValueError if another process has it open.
        """
        self._path = path
        self._lock = path.with_name(f".{path.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{path} is being written by another run; accepted is one at a time") from None
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
        """Adds the lines that are not there yet, in one write."""
        new = [line for line in lines if key_of(line) not in self]
        at = self._file.seek(0, os.SEEK_END)
        written = [encoded(line) for line in new]
        self._file.write(b"".join(written))
        self._file.flush()
        for line, data in zip(new, written, strict=True):
            self._enter(line, at, len(data))
            at += len(data)

    def finish(self, order: Iterable[Key]) -> None:
        """Puts the lines in order, each once; those of a former, larger run come after them."""
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
        """Replaces the file by one with these lines, at once."""
        new = self._path.with_name(f".{self._path.name}.new")
        with new.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        self._file.close()
        self._file = self._path.open("a+b")

    def _repair(self, say: Callable[[str], None]) -> None:
        self._file.seek(0)
        found = self._file.readlines()
        good = []
        for number, data in enumerate(found, 1):
            line = read_line(data)
            if line is None:
                say(f"{self._path}: line {number} of {len(found)} is not whole; it is dropped and asked again")
            else:
                good.append((line, data))
        if len(good) < len(found):
            self._rewrite(data for _, data in good)
        at = 0
        for line, data in good:
            self._enter(line, at, len(data))
            at += len(data)


def read_line(data: bytes) -> dict[str, Any] | None:
    """A line of results, None if it is not whole."""
    try:
        line = json.loads(data)
        key_of(line)
    except (ValueError, KeyError, TypeError):
        return None
    return line if data.endswith(b"\n") else None
