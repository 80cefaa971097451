"""Writes files in the form of torch.save without torch, instruction by instruction."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


class Raw(bytes):
    """Instructions that stand in the pickle as they are."""


def named(module: str, name: str) -> Raw:
    """GLOBAL."""
    return Raw(f"c{module}\n{name}\n".encode())


def called(function: Raw, *arguments: Any) -> Raw:
    """REDUCE. The arguments have no arrays."""
    return Raw(function + pickled(tuple(arguments), []) + b"R")


def pickled(value: Any, storages: list[np.ndarray]) -> bytes:
    """The instructions that build a value. The storages of its arrays are appended to `storages`."""

    def each(values: Any) -> bytes:
        return b"".join(pickled(item, storages) for item in values)

    match value:
        case Raw():
            return value
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            return b"J" + struct.pack("<i", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + each(value) + b"t"
        case list():
            return b"](" + each(value) + b"e"
        case dict():
            return b"}(" + b"".join(each(entry) for entry in value.items()) + b"u"
        case np.ndarray():
            storages.append(value)
            kind = named("torch", KINDS[value.dtype.name])
            return tensor(storage(kind, len(storages) - 1, value.size), 0, value.shape, _strides(value.shape))
    raise TypeError(type(value))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def storage(kind: Raw, key: int | str, size: int) -> Raw:
    """The persistent id of a storage."""
    return Raw(pickled(("storage", kind, str(key), "cpu", size), []) + b"Q")


def tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Raw:
    """A tensor of a storage, with an empty dictionary of hooks."""
    hooks = called(named("collections", "OrderedDict"))
    return called(named("torch._utils", "_rebuild_tensor_v2"), storage, offset, shape, strides, False, hooks)


def save(value: Any, path: Path, **options: Any) -> Path:
    """Writes a value as torch.save does, and returns the path."""
    storages: list[np.ndarray] = []
    return write(b"\x80\x02" + pickled(value, storages) + b".", storages, path, **options)


def write(
    pickle: bytes,
    storages: list[np.ndarray],
    path: Path,
    order: str | None = "little",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Writes the archive of a pickle and its storages; `order` is that of their bytes, and of no entry if None."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        if order is not None:
            archive.writestr("archive/byteorder", order)
        for key, array in enumerate(storages):
            flat = array.reshape(-1).view(f"u{array.itemsize}")
            archive.writestr(f"archive/data/{key}", (flat.byteswap() if order == "big" else flat).tobytes())
    return path
