"""Random numbers of generated tasks: a stream of their own for each example, so that none depends on how many there are."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """NumPy's generator for (seed, names), the same on every machine."""
    words = [seed, *(zlib.crc32(name.encode()) if isinstance(name, str) else name for name in names)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
