"""The tensors of a GGUF file, which are dequantised by slices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvjax.checkpoint.gguf.header import Header, round_up

PLAIN = ("F32", "F16", "BF16")  # the types that are the names of dtypes; all others become float32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file. It has the methods that `kvjax.checkpoint.source.Stored` asks for.

    Attributes:
        content: the bytes, [rows, bytes per row], a view of the file. A vector is one row.
        shape: the shape of the tensor.
        kind: the type that it is stored in.
        added: what llama.cpp has added to the numbers of a vector; it is taken off.
        heads: if the rows of each head are stored in llama.cpp's order, the number of heads; None otherwise.
    """

    content: np.ndarray
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    heads: int | None = None
    added: float = 0.0

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The name of the dtype that represents all values of the type."""
        return self.kind.name if self.kind.name in PLAIN else "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantises some rows and columns, or some elements of a vector, to float32.

        Args:
            index: a slice with a start and a stop for each axis.
        """
        rows = self._stored_rows(index[0])
        if len(self.shape) == 1:
            return gguf.dequantize(self.content[0], self.kind)[rows] - np.float32(self.added)
        block, size = GGML_QUANT_SIZES[self.kind]
        first, last = index[1].start // block, -(-index[1].stop // block)
        taken = np.ascontiguousarray(self.content[rows, first * size : last * size])
        return gguf.dequantize(taken, self.kind)[:, index[1].start - first * block : index[1].stop - first * block]

    def _stored_rows(self, rows: slice) -> slice | np.ndarray:
        """The rows of the file that hold rows of the tensor.

        llama.cpp rotates neighbouring channels, and Hugging Face's models the two halves of a head. A file for
        llama.cpp therefore has row j of a head's first half at 2 j, and row j of the second half at 2 j + 1.
        """
        if self.heads is None:
            return rows
        size = self.shape[0] // self.heads
        head, channel = np.divmod(np.arange(rows.start, rows.stop), size)
        half, pair = np.divmod(channel, size // 2)
        return head * size + 2 * pair + half


@cache
def dequantised() -> dict[int, GGMLQuantizationType]:
    """The types that the library dequantises, by their number."""
    found = {}
    for kind in GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found[int(kind)] = kind
    return found


def open_places(path: Path, header: Header, heads: Mapping[str, int], problems: list[str]) -> dict[str, GgufTensor]:
    """Returns the tensors of a file by name. Appends a sentence to `problems` for each fault.

    As llama.cpp, it accepts tensors only if they follow each other without gaps, so that no damaged offset is believed.

    Args:
        path: the file.
        header: its header.
        heads: the number of heads of each tensor whose rows are in llama.cpp's order.
        problems: the list to append to.
    """
    content = np.memmap(path, np.uint8, "r")
    served = dequantised()
    tensors: dict[str, GgufTensor] = {}
    expected: int | None = 0  # the start of the next tensor; None after one of unknown size
    for name, place in header.places.items():
        if place.kind not in served:
            accepted = ", ".join(kind.name for kind in served.values())
            problems.append(f"{name} has the type {_type_name(place.kind)}; accepted: {accepted}")
            expected = None
            continue
        kind = served[place.kind]
        block, size = GGML_QUANT_SIZES[kind]
        if place.shape[-1] % block:
            problems.append(f"{name} has rows of {place.shape[-1]} elements; {kind.name} needs a multiple of {block}")
            expected = None
            continue
        start, count = header.data + place.start, math.prod(place.shape) // block * size
        if place.start % header.alignment or (expected is not None and place.start != expected):
            wanted = "a multiple of the alignment" if expected is None else f"{expected:,}"
            problems.append(f"{name} starts at byte {place.start:,} of the data; expected {wanted}")
        elif start + count > len(content):
            problems.append(
                f"the file is truncated: {name} ends at byte {start + count:,}, the file at byte {len(content):,}"
            )
        else:
            rows = 1 if len(place.shape) == 1 else place.shape[0]
            view = content[start : start + count].reshape(rows, -1)
            tensors[name] = GgufTensor(view, place.shape, kind, heads.get(name))
        expected = round_up(place.start + count, header.alignment)
    return tensors


def _type_name(kind: int) -> str:
    return GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else str(kind)
