"""Reading the benchmarks' files, from a folder or the hub, field by field: a bad line is reported and the rest read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .task import DataError, Example, Fault, Source


@dataclass(frozen=True)
class Record:
    """A JSON object, and where it stands: "longbench/qasper.jsonl, line 3"."""

    where: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, where: str, value: Any) -> Record:
        if not isinstance(value, dict):
            raise DataError(f"{where}: {_kind(value)} where a JSON object is expected")
        return cls(where, value)

    def _get(self, name: str, expected: str) -> Any:
        if name not in self.fields:
            raise DataError(f"{self.where}: field {name!r} is missing; expected {expected}")
        return self.fields[name]

    def text(self, name: str, *, empty: bool = False) -> str:
        """A string; an empty one only if `empty`."""
        value = self._get(name, "a string")
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {name!r} is {_kind(value)}; expected a string")
        if not value.strip() and not empty:
            raise DataError(f"{self.where}: field {name!r} is empty")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of one string or more."""
        value = self._get(name, "a list of strings")
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise DataError(f"{self.where}: field {name!r} is {_kind(value)}; expected a list of one string or more")
        return tuple(value)

    def integer(self, name: str) -> int:
        value = self._get(name, "an integer")
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{self.where}: field {name!r} is {_kind(value)}; expected an integer")
        return value

    def items(self, name: str) -> list[Any]:
        value = self._get(name, "a list")
        if not isinstance(value, list):
            raise DataError(f"{self.where}: field {name!r} is {_kind(value)}; expected a list")
        return value

    def object(self, name: str) -> Record:
        return Record.of(f"{self.where}, {name}", self._get(name, "an object"))

    def records(self, name: str) -> list[Record]:
        """A list of objects."""
        return [Record.of(f"{self.where}, {name}[{i}]", value) for i, value in enumerate(self.items(name))]


def _kind(value: Any) -> str:
    if isinstance(value, list | dict | str) and not value:
        return "empty"
    names = {type(None): "null", list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def parse(where: str, raw: bytes) -> Any:
    """The JSON in `raw`; raises DataError."""
    try:
        return json.loads(raw)
    except ValueError as error:  # not UTF-8, or not JSON
        raise DataError(f"{where}: not JSON ({error})") from None


@dataclass(frozen=True)
class DataFile:
    """A benchmark's file.

    Attributes:
        path: below the data folder.
        repository: a data set on the hub that has it; empty if none does.
        archive: the zip file there that has one of this name, in whatever folder.
    """

    path: str
    repository: str = ""
    archive: str = ""

    def read(self, source: Source) -> bytes:
        """Its bytes; raises DataError where it is not to be had, saying what was looked for."""
        if source.folder is not None:
            return read(Path(source.folder) / self.path)
        if not self.repository:
            raise DataError(f"{self.path} is on no hub: name the folder that holds it (--data)")
        from huggingface_hub import hf_hub_download

        try:
            archive = hf_hub_download(self.repository, self.archive, repo_type="dataset")
            with zipfile.ZipFile(archive) as files:
                name = Path(self.path).name
                found = [one for one in files.namelist() if one.split("/")[-1] == name]
                if len(found) == 1:
                    return files.read(found[0])
                raise ValueError(f"it has {len(found)} files of this name")
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{Path(self.path).name} in {self.archive} of the data set {self.repository} cannot be read ({error}); "
                f"a folder (--data) with {self.path} does as well"
            ) from error

    def lines(self, source: Source) -> list[tuple[str, bytes]]:
        """(where, line) for each line that is not blank."""
        lines = self.read(source).splitlines()
        return [(f"{self.path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]

    def items(self, source: Source) -> list[tuple[str, Any]]:
        """(where, item) for each item of a JSON list."""
        value = parse(self.path, self.read(source))
        if not isinstance(value, list):
            raise DataError(f"{self.path}: {_kind(value)} where a list of objects is expected")
        return [(f"{self.path}, [{i}]", item) for i, item in enumerate(value)]


def read(path: Path) -> bytes:
    """A file's bytes; raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """A text file; raises DataError."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from None


def examples(found: Iterable[tuple[str, Any]], make: Callable[[Record], Example]) -> Iterator[Example | Fault]:
    """One example of each line or item; a Fault where `make` or the JSON fails, or an id comes twice."""
    seen: dict[str, str] = {}
    for where, value in found:
        try:
            example = make(Record.of(where, parse(where, value) if isinstance(value, bytes) else value))
            if example.id in seen:
                raise DataError(f"{where}: its id {example.id!r} is that of {seen[example.id]}")
        except DataError as error:
            yield Fault(where, str(error))
            continue
        seen[example.id] = where
        yield example
