"""Parameters of all experts in one tensor, whose columns or rows two parameters may share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from .weights import READ, FusedRows, Layout, Shape, Sliceable, Weight, aligned


@dataclass(frozen=True)
class StackedWeight(Weight):
    """A parameter [X, *in, out] of all experts, in a tensor with the same axes.

    `rows` are columns here: the parameter's part of every block of the tensor's last axis.
    """

    layout: Layout = "stacked"

    def hf_shape(self, shape: Shape) -> Shape:
        part = self._part
        return (*shape[:-1], shape[-1] // (part.stop - part.start) * part.block)

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Reads slice `index`, as `Weight.read` does: of the experts in the slice, at most READ elements at a time."""
        part = self._part
        ranges = [range(size)[taken] for size, taken in zip(shape, index, strict=True)]
        result = aligned(tuple(map(len, ranges)), dtype)
        all_columns = np.arange(self.hf_shape(shape)[-1]).reshape(-1, part.block)[:, part.start : part.stop]
        columns = all_columns.reshape(-1)[index[-1]]
        first, last = int(columns[0]), int(columns[-1]) + 1
        inner = ranges[1:-1]
        rows = max(READ // (last - first), 1)
        for i, expert in enumerate(ranges[0]):
            if not inner:
                result[i] = tensor[expert : expert + 1, first:last].reshape(-1)[columns - first]
                continue
            (taken,) = inner
            for start in range(taken.start, taken.stop, rows):
                stop = min(start + rows, taken.stop)
                read = tensor[expert : expert + 1, start:stop, first:last][0]
                result[i, start - taken.start : stop - taken.start] = read[:, columns - first]
        return result

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        part = self._part
        blocks = tensor.reshape(*tensor.shape[:-1], -1, part.block)
        blocks[..., part.start : part.stop] = parameter.reshape(*blocks.shape[:-1], part.stop - part.start)

    @property
    def _part(self) -> FusedRows:
        return self.rows or FusedRows(0, 1, 1)


@dataclass(frozen=True)
class StackedLinear(Weight):
    """A parameter [X, in, out] of all experts, in a tensor [X, out, in] whose rows it may share with another one."""

    layout: Layout = "linear"

    def hf_shape(self, shape: Shape) -> Shape:
        return (shape[0], *super().hf_shape(shape[1:]))

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Reads slice `index`, as `Weight.read` does, expert by expert."""
        result = aligned(tuple(len(range(size)[taken]) for size, taken in zip(shape, index, strict=True)), dtype)
        for i, expert in enumerate(range(shape[0])[index[0]]):
            result[i] = super().read(_Expert(tensor, expert), shape[1:], index[1:], dtype)
        return result

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        for one, part in zip(parameter, tensor, strict=True):
            super().write(one, part)


@dataclass(frozen=True)
class _Expert:
    """The matrix of one expert of a tensor [X, out, in]."""

    tensor: Sliceable
    expert: int

    def __getitem__(self, index: tuple[slice, ...], /) -> Any:
        return self.tensor[(slice(self.expert, self.expert + 1), *index)][0]
