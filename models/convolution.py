"""The kernel of a convolution over each channel by itself, in a tensor with an axis of one input channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike

from .weights import Layout, Shape, Sliceable, Weight


@dataclass(frozen=True)
class ConvolutionWeight(Weight):
    """A parameter [channels, taps], in a tensor [channels, 1, taps]."""

    layout: Layout = "embedding"

    def hf_shape(self, shape: Shape) -> Shape:
        channels, taps = shape
        return (channels, 1, taps)

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Reads slice `index`, as `Weight.read` does."""
        channels, taps = index
        return np.ascontiguousarray(tensor[channels, 0:1, taps][:, 0], dtype)

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        tensor[:, 0] = parameter
