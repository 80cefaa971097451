"""The header of a GGUF file: its metadata, and the place of each tensor. It reads no weights.

The reader of the `gguf` library makes an array per metadata element, which takes seconds for a vocabulary, and it loops
on a damaged length. This one checks every length against the file before it reads.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION, GGUFReader, GGUFValueType

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import unfetched
from kvjax.checks import shown

VERSIONS = (2, GGUF_VERSION)
SCALARS = GGUFReader.gguf_scalar_to_np  # the dtype of each type of value
MOST_AXES = 4


class Place(NamedTuple):
    """The shape of a tensor, its GGML type, and the byte of the data section at which it starts."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        metadata: the value of each key. 32-bit floats have the shortest decimal number that rounds to them.
        places: the place of each tensor by name, in the order of the file.
        alignment: the number of bytes that the start of each tensor is a multiple of.
        data: the byte of the file at which the data section starts.
    """

    metadata: dict[str, Any]
    places: dict[str, Place]
    alignment: int
    data: int


def read_header(path: Path) -> Header:
    """Reads the header of a file. Raises CheckpointError if the file is not GGUF, truncated or damaged."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != GGUF_MAGIC.to_bytes(4, "little"):
        raise CheckpointError(
            path, [unfetched(path) or f"it is not a GGUF file: it starts with {magic!r}; expected b'GGUF'"]
        )
    try:
        return _read(_Cursor(np.memmap(path, np.uint8, "r")))
    except _DamagedError as error:
        raise CheckpointError(path, [str(error)]) from None


class _DamagedError(Exception):
    """The sentence that says what is wrong with the file."""


class _Cursor:
    """A place in the bytes of a file, which moves over what is read."""

    def __init__(self, content: np.ndarray):
        self.content = content.data
        self.at = 4

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        if count > len(self.content) - self.at:
            raise _DamagedError(
                f"its header is truncated or damaged: {count:,} bytes are expected at byte {self.at:,}, and the file "
                f"ends at byte {len(self.content):,}"
            )
        self.at += count
        return self.content[self.at - count : self.at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def text(self) -> str:
        start = self.at
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("the text", start, "is not UTF-8") from None

    def value(self) -> Any:
        """A value of the type whose number comes first: a scalar, a text, or a list of either."""
        start, kind = self.at, self.u32()
        if kind == GGUFValueType.ARRAY:
            inner, count = self.u32(), self.u64()
            if inner == GGUFValueType.STRING:
                if 8 * count > len(self.content) - self.at:  # a text has 8 bytes or more
                    self.take(8 * count)
                return [self.text() for _ in range(count)]
            return self._scalars(inner, count, start)
        return self.text() if kind == GGUFValueType.STRING else self._scalars(kind, 1, start)[0]

    def _scalars(self, kind: int, count: int, start: int) -> list[Any]:
        if kind not in SCALARS:
            raise self.damaged("the value", start, f"has the unknown type {kind}")
        dtype = np.dtype(SCALARS[GGUFValueType(kind)]).newbyteorder("<")
        found = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return [float(str(x)) for x in found] if dtype == np.float32 else found.tolist()

    def damaged(self, what: str, start: int, fault: str) -> _DamagedError:
        return _DamagedError(f"its header is damaged: {what} at byte {start:,} {fault}")


def _read(cursor: _Cursor) -> Header:
    version = cursor.u32()
    if version not in VERSIONS:
        raise _DamagedError(
            f"it has version {version} of GGUF; accepted: {', '.join(map(str, VERSIONS))}, little-endian"
        )
    tensors, keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        start = cursor.at
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged("the key", start, f"occurs twice: {shown(key)}")
        metadata[key] = cursor.value()
    places: dict[str, Place] = {}
    for _ in range(tensors):
        start = cursor.at
        name, axes = cursor.text(), cursor.u32()
        if name in places:
            raise cursor.damaged("the tensor", start, f"occurs twice: {shown(name)}")
        if axes > MOST_AXES:
            raise cursor.damaged("the tensor", start, f"has {axes} axes; accepted: at most {MOST_AXES}")
        shape = tuple(cursor.u64() for _ in range(axes))[::-1]
        if not shape or not 0 < math.prod(shape) < 2**60:
            raise cursor.damaged("the tensor", start, f"has shape {shape}")
        places[name] = Place(shape, kind=cursor.u32(), start=cursor.u64())
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"general.alignment={shown(alignment)}: expected a power of two")
    return Header(metadata, places, alignment, data=round_up(cursor.at, alignment))


def round_up(count: int, multiple: int) -> int:
    """The count, rounded up to a multiple."""
    return -(-count // multiple) * multiple
