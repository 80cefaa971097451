"""Names and layouts of tensors in Hugging Face checkpoints, used to read and to write them.

A checkpoint stores a linear map as [out, in], an embedding as [V, E] and a bias or a norm's scale as a vector. A
parameter is one tensor, or some rows of a fused one, with heads as axes of their own. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from jax.typing import DTypeLike

Shape = tuple[int, ...]
Layout = Literal["vector", "embedding", "linear", "linear_from_heads", "stacked"]
"""How the axes of a tensor on disk correspond to those of a parameter."""
READ = 2**22  # the number of elements per read, which bounds the memory of a read beyond its result


class Sliceable(Protocol):
    """A tensor that is read by slices: the result of safetensors' `get_slice`, or an array."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Any: ...


@dataclass(frozen=True)
class FusedRows:
    """One parameter's part of a fused tensor: rows `start` to `stop` of every block of `block` rows."""

    start: int
    stop: int
    block: int


@dataclass(frozen=True)
class Weight:
    """One parameter and the checkpoint tensor that holds it.

    Attributes:
        path: the attributes from the decoder down to the parameter, such as `layers.0.attention.query`.
        name: the tensor's name in the checkpoint.
        layout: how the parameter's axes map to the tensor's:

            | layout              | parameter     | tensor        | used by |
            |---------------------|---------------|---------------|---------|
            | `vector`            | [*out]        | [out]         | biases, norm scales |
            | `embedding`         | [V, E]        | [V, E]        | the embedding |
            | `linear`            | [in, *out]    | [out, in]     | query, key, value, MLP, the output matrix |
            | `linear_from_heads` | [*in, out]    | [out, in]     | the attention output projection |
            | `stacked`           | [X, *in, out] | [X, *in, out] | `StackedWeight` alone |

        rows: the parameter's rows of a fused tensor; None if the tensor holds this parameter alone.
        expert: the index of the item of the parameter's first axis that the tensor holds; None if it holds all of the
            parameter. The layouts above are then of that item.
        paired: the number of channels of each head, from the first, that RoPE rotates and whose pairs are neighbours in
            the tensor. Here the first channels of all pairs precede the second ones. 0 if they do so in the tensor too.
        wide: whether the decoder converts the parameter to float32 before it computes with it. Such a parameter keeps a
            stored float32 in a model of another dtype.
    """

    path: str
    name: str
    layout: Layout
    rows: FusedRows | None = None
    expert: int | None = None
    paired: int = 0
    wide: bool = False

    def hf_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the checkpoint tensor that holds this parameter of shape `shape`.

        Raises:
            ValueError: `rows` does not divide the parameter.
        """
        shape = self._held(shape)
        _, columns = self._axes(shape)
        blocks, part = self._blocks(shape)
        return (blocks * part.block, math.prod(shape[columns])) if shape[columns] else (blocks * part.block,)

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Reads slice `index` of the parameter of shape `shape`, cast to `dtype`.

        It reads only the tensor rows that the slice needs, and of each row the shortest column range that contains the
        slice. It reads at most READ elements, or one row, at a time.

        Args:
            tensor: the checkpoint's tensor, of shape `hf_shape(shape)`; only slices are taken of it.
            shape: the shape of the whole parameter.
            index: a slice of step 1 for each axis of the parameter. That of experts is not looked at.
            dtype: the dtype of the result.

        Returns:
            A C-contiguous array of the shape of the slice, of one expert if the tensor holds one.
        """
        shape, index = self._held(shape), self._held(index)
        rows, columns = self._axes(shape)
        blocks, part = self._blocks(shape)
        all_rows = np.arange(blocks * part.block).reshape(blocks, part.block)[:, part.start : part.stop]
        wanted_rows = np.ravel(self._ordered(all_rows.reshape(shape[rows]))[index[rows]])
        wanted_columns = np.ravel(np.arange(math.prod(shape[columns])).reshape(shape[columns])[index[columns]])
        first, last = int(wanted_columns[0]), int(wanted_columns[-1]) + 1
        chosen = slice(None) if len(wanted_columns) == last - first else wanted_columns - first
        transposed = self._transposed
        sides = (len(wanted_columns), len(wanted_rows)) if transposed else (len(wanted_rows), len(wanted_columns))
        result = aligned(sides, dtype)
        target = result.T if transposed else result
        places, done = np.argsort(wanted_rows), 0
        for run in _runs(wanted_rows[places], max(READ // (last - first), 1)):
            read = tensor[(run, slice(first, last)) if shape[columns] else (run,)]
            count = run.stop - run.start
            at = places[done : done + count] if self._reorders else slice(done, done + count)
            target[at] = read.reshape(count, -1)[:, chosen]
            done += count
        return result.reshape([len(range(size)[taken]) for size, taken in zip(shape, index, strict=True)])

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Writes what the tensor holds of the parameter into its rows of `tensor`, a contiguous array."""
        _, columns = self._axes(parameter.shape)
        blocks, part = self._blocks(parameter.shape)
        width = math.prod(parameter.shape[columns])
        matrix = parameter.reshape(width, -1).T if self._transposed else parameter.reshape(-1, width)
        if self._reorders:
            rows = np.arange(len(matrix)).reshape(-1, parameter.shape[-1])
            matrix = matrix[np.argsort(self._ordered(rows), axis=None)]
        tensor.reshape(blocks, part.block, width)[:, part.start : part.stop] = matrix.reshape(blocks, -1, width)

    @property
    def _reorders(self) -> bool:
        """Tells whether the rows of the tensor have another order than those of the parameter."""
        return self.paired > 0

    def _ordered(self, x: np.ndarray) -> np.ndarray:
        """Takes rows, whose last axis is that of the parameter, from their order in the tensor to the parameter's."""
        if not self._reorders:
            return x
        order = np.arange(x.shape[-1])
        order[: self.paired] = order[: self.paired].reshape(-1, 2).T.reshape(-1)
        return x[..., order]

    def _held(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Drops the expert axis of the parameter if the tensor holds a single expert."""
        return axes if self.expert is None else axes[1:]

    @property
    def _transposed(self) -> bool:
        return self.layout in ("linear", "linear_from_heads")

    def _axes(self, shape: Shape) -> tuple[slice, slice]:
        """Returns the parameter's axes that form the tensor's rows, and those that form its columns."""
        split = {"vector": len(shape), "embedding": 1, "linear": 1, "linear_from_heads": len(shape) - 1}[self.layout]
        leading, trailing = slice(0, split), slice(split, None)
        return (trailing, leading) if self._transposed else (leading, trailing)

    def _blocks(self, shape: Shape) -> tuple[int, FusedRows]:
        """Returns the number of blocks in the tensor's rows, and the parameter's part of each."""
        count = math.prod(shape[self._axes(shape)[0]])
        part = self.rows or FusedRows(0, count, count)
        blocks, rest = divmod(count, part.stop - part.start)
        if rest:
            raise ValueError(
                f"{self.path} has {count} rows in {self.name}; expected a multiple of {part.stop - part.start}, the "
                f"number of rows in {part}"
            )
        return blocks, part


def linear_weights(path: str, name: str, bias: bool = False, layout: Layout = "linear") -> list[Weight]:
    """Returns the weights of a linear map: its matrix, and its bias if it has one."""
    matrix = Weight(path, f"{name}.weight", layout)
    return [matrix, Weight(f"{path}_bias", f"{name}.bias", "vector")] if bias else [matrix]


def mlp_weights(path: str, name: str) -> list[Weight]:
    """Returns the matrices of a gated MLP without biases."""
    return [Weight(f"{path}.{part}", f"{name}.{part}_proj.weight", "linear") for part in ("gate", "up", "down")]


def aligned(shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """Returns an empty array aligned to 64 bytes, which JAX takes over on the CPU without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _runs(indices: np.ndarray, longest: int) -> Iterator[slice]:
    """Splits ascending indices into ranges of consecutive ones, of at most `longest` each."""
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        for start in range(int(run[0]), int(run[-1]) + 1, longest):
            yield slice(start, min(start + longest, int(run[-1]) + 1))


def by_parameter(table: Iterable[Weight]) -> dict[str, list[Weight]]:
    """Groups weights by the parameter that they hold: one weight, or one for each expert."""
    grouped: dict[str, list[Weight]] = {}
    for weight in table:
        grouped.setdefault(weight.path, []).append(weight)
    return grouped


def read_parameter(
    weights: Sequence[Weight],
    tensors: Mapping[str, Sliceable],
    shape: Shape,
    index: tuple[slice, ...],
    dtype: DTypeLike,
) -> np.ndarray:
    """Reads slice `index` of the parameter that `weights` of `by_parameter` hold.

    Of a parameter with an item for each expert, it reads the tensors of the experts in the slice only. The arguments
    are those of `Weight.read`.
    """
    if weights[0].expert is None:
        return weights[0].read(tensors[weights[0].name], shape, index, dtype)
    result = aligned(tuple(len(range(size)[taken]) for size, taken in zip(shape, index, strict=True)), dtype)
    own = {weight.expert: weight for weight in weights}
    for i, expert in enumerate(range(shape[0])[index[0]]):
        result[i] = own[expert].read(tensors[own[expert].name], shape, index, dtype)
    return result


def by_tensor(table: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Groups weights by the checkpoint tensor that holds them, in the order of their rows."""
    grouped: dict[str, tuple[Weight, ...]] = {}
    for weight in table:
        grouped[weight.name] = (*grouped.get(weight.name, ()), weight)
    return {
        name: tuple(sorted(weights, key=lambda weight: weight.rows.start if weight.rows else 0))
        for name, weights in grouped.items()
    }


def hf_shapes(table: Iterable[Weight], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shape of each checkpoint tensor by name, from the shapes of the parameters by path.

    Raises:
        ValueError: the parameters of a tensor do not cover its rows exactly once, so the table is wrong.
    """
    expected = {}
    for name, weights in by_tensor(table).items():
        tensor_shapes = {weight.hf_shape(shapes[weight.path]) for weight in weights}
        parts = [weight.rows or FusedRows(0, 1, 1) for weight in weights]
        starts, stops = [part.start for part in parts], [part.stop for part in parts]
        if len(tensor_shapes) != 1 or [0, *stops] != [*starts, parts[-1].block]:
            paths = ", ".join(weight.path for weight in weights)
            raise ValueError(f"{paths} do not cover the rows of the tensor {name} exactly once")
        expected[name] = tensor_shapes.pop()
    return expected
