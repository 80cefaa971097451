"""Token ids of several prompts in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.cache import bucket


@dataclass(frozen=True)
class Batch:
    """Token ids of a batch, padded on the left.

    Attributes:
        tokens: int32. The ids of row b are its last `lengths[b]` columns.
        lengths: int32, the number of tokens of each row.
    """

    tokens: Int[Any, "B N"]
    lengths: Int[Any, "B"]

    @classmethod
    def of(cls, rows: Sequence[Int[np.ndarray, "_"]], size: int | None = None) -> Batch:
        """Pads the rows with zeros to `size` columns. The default is the bucket of the longest row."""
        lengths = np.array([row.size for row in rows], np.int32)
        tokens = np.zeros((len(rows), size or bucket(int(lengths.max()))), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[padded.size - row.size :] = row
        return cls(tokens, lengths)

    @property
    def arrays(self) -> tuple[Int[Any, "B N"], Int[Any, "B"]]:
        """The tokens and the lengths."""
        return self.tokens, self.lengths

    def chunks(self, size: int | None) -> list[Batch]:
        """Cuts the columns into chunks of `size`, None for one; the first one is padded. All rows end in the last.

        Only arrays of the host are cut into several chunks.
        """
        columns = self.tokens.shape[1]
        if size is None or size >= columns:
            return [self]
        number = -(-columns // size)
        tokens = np.split(np.pad(self.tokens, ((0, 0), (number * size - columns, 0))), number, axis=1)
        behind = range((number - 1) * size, -1, -size)
        return [Batch(part, np.clip(self.lengths - rest, 0, size)) for part, rest in zip(tokens, behind, strict=True)]
