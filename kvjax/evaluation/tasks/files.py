"""Reads the benchmarks' files from a folder or the hub. A line that cannot be used is reported, the others are read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.checks import shown
from kvjax.files.reading import read_bytes

from .task import DataError, Example, Fault, Source

MOST = 2**33  # bytes of a data file


@dataclass(frozen=True)
class Record:
    """A JSON object and its location, such as "longbench/qasper.jsonl, line 3"."""

    where: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, where: str, value: Any) -> Record:
        """A record of a JSON value. Raises DataError if the value is not an object."""
        if not isinstance(value, dict):
            raise DataError(f"{where} is {_kind(value)}; expected a JSON object")
        return cls(where, value)

    def _get(self, name: str, kind: type, expected: str) -> Any:
        """The field, which must be of a kind."""
        if name not in self.fields:
            raise DataError(f"{self.where}: field {shown(name)} is missing; expected {expected}")
        if not isinstance(value := self.fields[name], kind) or isinstance(value, bool):
            raise DataError(f"{self.where}: field {shown(name)} is {_kind(value)}; expected {expected}")
        return value

    def text(self, name: str, *, empty: bool = False) -> str:
        """The field as a string, which may be blank only if `empty`. Raises DataError."""
        value = self._get(name, str, "a string")
        if not value.strip() and not empty:
            raise DataError(f"{self.where}: field {shown(name)} is empty; expected a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """The field as a list of at least one string. Raises DataError."""
        value = self._get(name, list, "a list of at least one string")
        if not value or not all(isinstance(one, str) for one in value):
            raise DataError(
                f"{self.where}: field {shown(name)} is {_kind(value)}; expected a list of at least one string"
            )
        return tuple(value)

    def integer(self, name: str) -> int:
        """The field as an integer. Raises DataError."""
        return self._get(name, int, "an integer")

    def items(self, name: str) -> list[Any]:
        """The field as a list. Raises DataError."""
        return self._get(name, list, "a list")

    def object(self, name: str) -> Record:
        """The field as a record. Raises DataError."""
        return Record.of(f"{self.where}, {name}", self._get(name, object, "an object"))

    def records(self, name: str) -> list[Record]:
        """The field as a list of records. Raises DataError."""
        return [Record.of(f"{self.where}, {name}[{i}]", value) for i, value in enumerate(self.items(name))]


def _kind(value: Any) -> str:
    if isinstance(value, list | dict | str) and not value:
        return "empty"
    names = {type(None): "null", list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def parse(where: str, raw: bytes) -> Any:
    """The JSON value in `raw`. Raises DataError if it is not JSON in UTF-8."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise DataError(f"{where} is not JSON: {error}") from None


@dataclass(frozen=True)
class DataFile:
    """A data file of a benchmark.

    Attributes:
        path: the path below the data folder.
        repository: the data set on the hub that has a file of this name; empty if none has it.
        archive: the zip file in this data set that contains it, in any folder; empty if the data set itself does.
    """

    path: str
    repository: str = ""
    archive: str = ""

    def read(self, source: Source) -> bytes:
        """The bytes of the file. Raises DataError, which names the file, if it cannot be read."""
        if source.folder is not None:
            return read(source.folder / self.path)
        if not self.repository:
            raise DataError(f"{self.path} is not on the hub: expected a folder that holds it (--data)")
        from huggingface_hub import hf_hub_download

        name = Path(self.path).name
        try:
            downloaded = Path(hf_hub_download(self.repository, self.archive or name, repo_type="dataset"))
            if not self.archive:
                return read_bytes(downloaded, MOST)
            with zipfile.ZipFile(downloaded) as files:
                found = [one for one in files.namelist() if one.split("/")[-1] == name]
                if len(found) == 1:
                    return files.read(found[0])
                raise ValueError(f"{len(found)} files have this name; expected one")
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise DataError(
                f"cannot read {name} {f'in {self.archive} ' if self.archive else ''}of the data set {self.repository}: "
                f"{error}. A folder (--data) with {self.path} is accepted as well"
            ) from error

    def lines(self, source: Source) -> list[tuple[str, bytes]]:
        """The location and the bytes of each line that is not blank."""
        lines = self.read(source).splitlines()
        return [(f"{self.path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]

    def items(self, source: Source) -> list[tuple[str, Any]]:
        """The location and the value of each item of a JSON list. Raises DataError if the file is no JSON list."""
        value = parse(self.path, self.read(source))
        if not isinstance(value, list):
            raise DataError(f"{self.path} is {_kind(value)}; expected a list of objects")
        return [(f"{self.path}, [{i}]", item) for i, item in enumerate(value)]


def read(path: Path) -> bytes:
    """The bytes of a file. Raises DataError if it cannot be read."""
    try:
        return read_bytes(path, MOST)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(str(error)) from None


def read_text(path: Path) -> str:
    """The text of a file. Raises DataError if it cannot be read or is not UTF-8."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None


def examples(found: Iterable[tuple[str, Any]], make: Callable[[Record], Example]) -> Iterator[Example | Fault]:
    """Makes an example of each line or item, or a Fault if the JSON or `make` fails or an id occurs twice."""
    seen: dict[str, str] = {}
    for where, value in found:
        try:
            example = make(Record.of(where, parse(where, value) if isinstance(value, bytes) else value))
            if example.id in seen:
                raise DataError(
                    f"{where}: id {shown(example.id)} is also the id of {seen[example.id]}; expected another"
                )
        except DataError as error:
            yield Fault(where, str(error))
            continue
        seen[example.id] = where
        yield example
