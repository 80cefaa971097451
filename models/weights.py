"""Names of tensors in Hugging Face checkpoints, and how each is laid out there. Used in both directions.

There a tensor has its rows first: the outputs of a linear map, the tokens of an embedding, the entries of a vector.
A parameter is a tensor or some rows of one, with heads as axes of their own. No files are touched here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jax.typing import DTypeLike

Shape = tuple[int, ...]
READ = 2**22  # numbers read at a time: what a read holds beside its result


class Sliceable(Protocol):
    """A tensor of a file, of which slices are read: safetensors' `get_slice`, or an array."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Any: ...


@dataclass(frozen=True)
class Rows:
    """A part of a fused tensor: rows `start` to `stop` of every block of `of` rows."""

    start: int
    stop: int
    of: int


@dataclass(frozen=True)
class Weight:
    """One parameter and the checkpoint tensor that holds it.

    Attributes:
        path: attributes from the decoder down to the parameter, e.g. `layers.0.attention.query`.
        name: the tensor's name in the checkpoint. A bias is a vector there.
        transposed: the checkpoint holds a linear map as [out, in]; ours is [in, out] with heads as axes of their own.
        rows: the parameter's part of a tensor that others share; None where it has one of its own.
    """

    path: str
    name: str
    transposed: bool
    rows: Rows | None = None

    def hf_shape(self, shape: Shape) -> Shape:
        """The shape, in the checkpoint, of the tensor that holds this parameter of shape `shape`."""
        _, columns = self._axes(shape)
        blocks, part = self._blocks(shape)
        return (blocks * part.of, math.prod(shape[columns])) if shape[columns] else (blocks * part.of,)

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Part `index` of the parameter of shape `shape`, cast to `dtype`.

        Reads the rows that hold it and no others, of each the shortest range of columns that does, a few at a time.

        Args:
            tensor: the checkpoint's tensor, of shape `hf_shape(shape)`; only slices are taken of it.
            index: a slice of step 1 for each axis of the parameter.
        """
        rows, columns = self._axes(shape)
        blocks, part = self._blocks(shape)
        places = np.arange(blocks * part.of).reshape(blocks, part.of)[:, part.start : part.stop]
        wanted = np.ravel(places.reshape(shape[rows])[index[rows]])
        across = np.ravel(np.arange(math.prod(shape[columns])).reshape(shape[columns])[index[columns]])
        first, last = int(across[0]), int(across[-1]) + 1
        chosen = slice(None) if len(across) == last - first else across - first
        sides = (len(across), len(wanted)) if self.transposed else (len(wanted), len(across))
        result = _aligned(sides, dtype)
        target = result.T if self.transposed else result
        done = 0
        for run in _runs(wanted, max(READ // (last - first), 1)):
            read = tensor[(run, slice(first, last)) if shape[columns] else (run,)]
            count = run.stop - run.start
            target[done : done + count] = read.reshape(count, -1)[:, chosen]
            done += count
        return result.reshape([len(range(size)[taken]) for size, taken in zip(shape, index, strict=True)])

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Fills in this parameter's part of `tensor`, a contiguous array of shape `hf_shape(parameter.shape)`."""
        _, columns = self._axes(parameter.shape)
        blocks, part = self._blocks(parameter.shape)
        width = math.prod(parameter.shape[columns])
        matrix = parameter.reshape(width, -1).T if self.transposed else parameter.reshape(-1, width)
        tensor.reshape(blocks, part.of, width)[:, part.start : part.stop] = matrix.reshape(blocks, -1, width)

    def _axes(self, shape: Shape) -> tuple[slice, slice]:
        """Which of the parameter's axes are the tensor's rows and which its columns."""
        if self.transposed:
            split = len(shape) - 1 if self.path.endswith("output") else 1
            return slice(split, None), slice(0, split)
        split = len(shape) if self.name.endswith("bias") else 1
        return slice(0, split), slice(split, None)

    def _blocks(self, shape: Shape) -> tuple[int, Rows]:
        """The number of blocks in the tensor's rows, and the parameter's part of each."""
        count = math.prod(shape[self._axes(shape)[0]])
        part = self.rows or Rows(0, count, count)
        blocks, rest = divmod(count, part.stop - part.start)
        if rest:
            raise ValueError(f"{self.path} has {count} rows in {self.name}, which {part} does not divide")
        return blocks, part


def _aligned(shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """An empty array that begins at a multiple of 64 bytes: JAX takes such a one over, on the CPU, without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _runs(places: np.ndarray, longest: int) -> Iterator[slice]:
    """Ascending places as ranges of neighbours, none longer than `longest`."""
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
        for start in range(int(run[0]), int(run[-1]) + 1, longest):
            yield slice(start, min(start + longest, int(run[-1]) + 1))


def by_tensor(table: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """The parameters that each tensor of the checkpoint holds, in the order of their rows."""
    held: dict[str, tuple[Weight, ...]] = {}
    for weight in table:
        held[weight.name] = (*held.get(weight.name, ()), weight)
    return {
        name: tuple(sorted(weights, key=lambda weight: weight.rows.start if weight.rows else 0))
        for name, weights in held.items()
    }


def hf_shapes(table: Iterable[Weight], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shape of each tensor of the checkpoint, from the parameters' shapes by path.

    Raises ValueError if the parameters that share a tensor do not make up a whole one: the table is wrong.
    """
    expected = {}
    for name, weights in by_tensor(table).items():
        whole = {weight.hf_shape(shapes[weight.path]) for weight in weights}
        parts = [weight.rows or Rows(0, 1, 1) for weight in weights]
        if len(whole) != 1 or [0, *(part.stop for part in parts)] != [*(part.start for part in parts), parts[-1].of]:
            raise ValueError(f"{', '.join(weight.path for weight in weights)} do not make up the tensor {name}")
        expected[name] = whole.pop()
    return expected
