"""Experts that a checkpoint has in one tensor, as tensors of one expert each.

Published checkpoints have a tensor for each expert and matrix. transformers holds all experts of a layer in two
tensors, [X, 2 F, E] of gate and up, and [X, E, F], and `save_pretrained(..., save_original_format=False)` writes these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.checkpoint.tensors import Stored
from kvjax.models import DecoderConfig, family


@dataclass(frozen=True)
class OneExpert:
    """Rows `start` to `stop` of one expert in a tensor [X, rows, columns]."""

    tensor: Stored
    expert: int
    start: int
    stop: int

    def get_shape(self) -> list[int]:
        return [self.stop - self.start, self.tensor.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        begin, end, _ = rows.indices(self.stop - self.start)
        return self.tensor[self.expert, self.start + begin : self.start + end, columns]


def experts_apart(tensors: Mapping[str, Stored], config: DecoderConfig) -> dict[str, Stored]:
    """Returns the tensors under their published names, with those of all experts taken apart."""
    names: Any = getattr(family(config.family), "EXPERTS", None)
    if names is None:
        return dict(tensors)
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        block, _, last = name.rpartition(".mlp.experts.")
        if last in ("gate_up_proj", "down_proj") and len(tensor.get_shape()) == 3:
            parts = (names.gate, names.up) if last == "gate_up_proj" else (names.down,)
            found |= {f"{block}.{names.block}.experts.{part}": x for part, x in _apart(tensor, parts)}
        else:
            found[name.replace(".mlp.gate.", f".{names.block}.gate.")] = tensor
    return found


def _apart(tensor: Stored, parts: tuple[str, ...]) -> Iterator[tuple[str, OneExpert]]:
    """The matrices of each expert. `parts` names those that share the rows."""
    experts, rows, _ = tensor.get_shape()
    size = rows // len(parts)
    for expert in range(experts):
        for i, part in enumerate(parts):
            yield f"{expert}.{part}.weight", OneExpert(tensor, expert, i * size, (i + 1) * size)
