"""Experts in MXFP4, the 4-bit floating point of OCP's Microscaling Formats (MX) Specification 1.0, as gpt-oss has them.

A matrix [X, in, out] is stored transposed, in two tensors. Blocks of 32 inputs share a scale 2^(s - 127), one byte s in
`NAME_scales` [X, out, in / 32]; s = 255 is NaN. Their 32 numbers, E2M1, are in 16 bytes of `NAME_blocks` [X, out,
in / 32, 16]. The low half of a byte is the earlier number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvjax.checkpoint.tensors import Stored

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
BIAS, NAN = 127, 255
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = np.stack([_NUMBERS[np.arange(256) % 16], _NUMBERS[np.arange(256) // 16]], axis=-1)  # of each byte


@dataclass(frozen=True)
class Mxfp4:
    """A tensor [X, in, out] that is dequantised slice by slice. bfloat16 represents its numbers exactly."""

    blocks: Stored
    scales: Stored

    def get_shape(self) -> list[int]:
        experts, outputs, count, _ = self.blocks.get_shape()
        return [experts, count * BLOCK, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        """Returns float32. It reads the blocks that have a part in the slice."""
        experts, inputs, outputs = index
        start, stop, _ = inputs.indices(self.get_shape()[1])
        first = start // BLOCK
        counted = slice(first, -(-stop // BLOCK))
        numbers = _PAIRS[self.blocks[experts, outputs, counted, :]]
        numbers = numbers.reshape(*numbers.shape[:3], BLOCK)
        scales = self.scales[experts, outputs, counted][..., None]
        with np.errstate(over="ignore"):  # 6 * 2^127 is infinite in float32 and in bfloat16
            numbers = np.ldexp(numbers, scales.astype(np.int32) - BIAS)
        wide = np.where(scales == NAN, np.float32(np.nan), numbers).reshape(*numbers.shape[:2], -1)
        return np.swapaxes(wide[..., start - first * BLOCK : stop - first * BLOCK], 1, 2)


def dequantised(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors, with one for each pair of MXFP4 blocks and scales. What is no such pair stays as it is."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        whole = name.removesuffix(BLOCKS)
        blocks, scales = tensors[name], tensors.get(whole + SCALES)
        if scales is not None and whole not in tensors and _fit(blocks, scales):
            del found[name], found[whole + SCALES]
            found[whole] = Mxfp4(blocks, scales)
    return found


def _fit(blocks: Stored, scales: Stored) -> bool:
    """Returns whether two tensors are the blocks and scales of one matrix per expert."""
    *shape, size = blocks.get_shape()
    bytes_alone = blocks.get_dtype() == scales.get_dtype() == "U8"
    return bytes_alone and len(shape) == 3 and size == BLOCK // 2 and list(scales.get_shape()) == shape
