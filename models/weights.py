"""Names of tensors in Hugging Face checkpoints, and how each is laid out there. Used in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weight:
    """One parameter and the checkpoint tensor that holds it.

    Attributes:
        path: attributes from the decoder down to the parameter, e.g. `layers.0.attention.query`.
        name: the tensor's name in the checkpoint.
        transposed: the checkpoint holds a linear map as [out, in]; ours is [in, out] with heads as axes of their own.
    """

    path: str
    name: str
    transposed: bool

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape this parameter has in the checkpoint. Of a linear map's axes the one named hidden stands alone."""
        if not self.transposed:
            return shape
        split = len(shape) - 1 if self.path.endswith("output") else 1
        return (int(np.prod(shape[split:])), int(np.prod(shape[:split])))

    def from_hf(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return tensor.T.reshape(shape) if self.transposed else tensor

    def to_hf(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.hf_shape(tensor.shape)[::-1]).T if self.transposed else tensor
