"""The results file of a run: one JSON line per answer, appended as soon as the answer exists.

A run that was killed continues where it stopped. At its end, `results.jsonl` has each planned line once, in the planned
order. The file is therefore identical, byte by byte, to that of an uninterrupted run. Times and dates differ from run
to run and are in `timings.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation.lines import ASKED, QUESTION, Key, Line, encoded, key_of, read_answer
from kvjax.files.writing import lock, new_file

RESULTS, TIMINGS = "results.jsonl", "timings.jsonl"


class Records:
    """A context manager for the results file. Only one process at a time can open the file.

    A line with an `error` counts as missing when the file is opened again, so that its question is asked again.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        """Opens or creates the file. Drops lines that are damaged, as after a kill, with a notice to `say`.

        Raises:
            ValueError: if another process has the file open.
        """
        self._path = path
        self._lock = path.with_name(f".{path.name}.lock").open("w")
        if not lock(self._lock.fileno()):
            self._lock.close()
            raise ValueError(f"another run is writing {path}: expected one run at a time")
        self.texts: dict[Key, str] = {}  # of the policies that have answers, by label, budget and setting
        self.asked: dict[Key, Line] = {}  # a line of each question that has an answer, by `ASKED`
        self._at: dict[Key, tuple[int, int]] = {}
        self._failed: set[Key] = set()
        self._order: list[Key] = []
        at = 0
        for line, data in repaired(path, read_answer, say, "its question is asked again"):
            self._enter(line, at, len(data))
            at += len(data)
        self._file = path.open("a+b")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.close()

    def __contains__(self, key: object) -> bool:
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

    def finish(self, order: Iterable[Key], settled: Callable[[Key], bool]) -> None:
        """Sorts the file so that it has each line once. Lines of an earlier, larger run follow at the end.

        Args:
            order: the keys of the run's lines.
            settled: whether an error with another key is over, by the key; its line is dropped.
        """
        planned = [key for key in order if key in self._at]
        known = set(planned)
        rest = (key for key in self._at if key not in known)
        wanted = planned + [key for key in rest if not (key in self._failed and settled(key))]
        if wanted != self._order:
            _replace(self._path, [self._line(key) for key in wanted])
            self._file.close()
            self._file = self._path.open("a+b")
            self._order = wanted

    def _line(self, key: Key) -> bytes:
        at, size = self._at[key]
        self._file.seek(at)
        return self._file.read(size)

    def _enter(self, line: Mapping[str, Any], at: int, size: int) -> None:
        key = key_of(line)
        self._at[key] = at, size
        self._order.append(key)
        if "error" not in line:
            self.texts[key[: -len(ASKED)]] = line["text"]
            self.asked.setdefault(key[-len(ASKED) :], {name: line[name] for name in QUESTION if name in line})
        (self._failed.add if "error" in line else self._failed.discard)(key)


def repaired(
    path: Path, read: Callable[[bytes], Line], say: Callable[[str], None], loss: str
) -> list[tuple[Line, bytes]]:
    """Drops the lines of a file that cannot be read, with a notice to `say`. Returns the others, parsed and as bytes.

    Args:
        path: the file; it may be absent.
        read: parses a line, or raises ValueError.
        say: receives a notice for each dropped line.
        loss: what dropping a line leads to, for the notice.
    """
    found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    good = []
    for number, data in enumerate(found, 1):
        try:
            good.append((read(data), data))
        except ValueError as error:
            say(f"{path}, line {number} of {len(found)}: {error}; {loss}")
    if len(good) < len(found):
        _replace(path, (data for _, data in good))
    return good


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replaces a file atomically by one with these lines."""
    with new_file(path) as new, new.open("wb") as file:
        file.writelines(lines)
