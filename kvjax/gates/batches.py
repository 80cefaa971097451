"""Batches that are drawn once, kept on disk, and used in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvjax.files.writing import new_file


@dataclass(frozen=True)
class InTurn:
    """The batch of a step: one of `count`, each of which is drawn when it is first used.

    Attributes:
        draw: makes the batch of an index in 0 .. count - 1.
        count: the number of different batches.
        folder: holds them, so that an interrupted run does not draw them again, unless a file is damaged.
    """

    draw: Callable[[int], tuple[Array | np.ndarray, ...]]
    count: int
    folder: Path

    def __call__(self, step: int) -> tuple[np.ndarray, ...]:
        index = step % self.count
        path = self.folder / f"{index}.safetensors"
        if (found := _read(path)) is None:
            found = tuple(map(np.asarray, self.draw(index)))
            self.folder.mkdir(exist_ok=True)
            with new_file(path) as new:
                save_file({str(at): array for at, array in enumerate(found)}, new)
        return found


def _read(path: Path) -> tuple[np.ndarray, ...] | None:
    """The arrays of a file; None if it is absent or damaged."""
    try:
        arrays = load_file(path)
        return tuple(arrays[str(at)] for at in range(len(arrays)))
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
