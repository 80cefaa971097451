"""A file of measurements: one JSON line each, appended as soon as it is there, so that a later call can continue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.evaluation.lines import Key, Line, encoded
from kvjax.evaluation.records import repaired


class MeasuredLines:
    """The lines of a file that have one setting, each found by its key.

    The file may hold lines of other settings, which are neither read nor changed.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any], key: tuple[str, ...]):
        """Reads the file, if there is one. Drops lines that are incomplete, as after a kill, and says so.

        Args:
            path: the file. Its folder is made.
            setting: the fields that the lines of this call have in common, such as the model.
            key: the names of the fields that tell lines of one setting apart.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._setting, self._key = path, dict(setting), key
        self._found: dict[Key, Line] = {}
        for line, _ in repaired(path, parsed, lambda notice: print(notice, file=sys.stderr), "it is measured again"):
            if self._setting.items() <= line.items():
                self._enter(line)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> Line:
        return self._found[key]

    def __iter__(self) -> Iterator[Line]:
        """The lines in the order of the file. A line that was measured again replaces the earlier one."""
        return iter(self._found.values())

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines to the file, with the setting, in one write."""
        whole = [{**self._setting, **line} for line in lines]
        with self._path.open("ab") as file:
            file.write(b"".join(map(encoded, whole)))
        for line in whole:
            self._enter(line)

    def _enter(self, line: Line) -> None:
        self._found[tuple(line[name] for name in self._key)] = line


def parsed(data: bytes) -> Line:
    """A line of the file. Raises ValueError if it is incomplete."""
    try:
        line = json.loads(data)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not data.endswith(b"\n"):
        raise ValueError("it is incomplete: expected a JSON object and a line end")
    return line
