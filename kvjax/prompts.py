"""From what a user calls a prompt to arrays: text or ids, one or many, checked and padded. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from kvjax.extend import bucket

Prompt: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Int[Any, "N"] | Int[Any, "B N"]


@dataclass(frozen=True)
class Batch:
    """Token ids padded on the left to a bucketed length.

    Attributes:
        tokens: int32; row b's ids are its last `lengths[b]` columns, zeros before them.
        lengths: of each row.
    """

    tokens: Int[np.ndarray, "B N"]
    lengths: Int[np.ndarray, "B"]

    @classmethod
    def of(cls, rows: Sequence[Int[np.ndarray, "_"]], size: int | None = None) -> Batch:
        """Pads rows to `size`, by default the bucket of the longest."""
        lengths = np.array([row.size for row in rows], np.int32)
        tokens = np.zeros((len(rows), size or bucket(int(lengths.max()))), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[padded.size - row.size :] = row
        return cls(tokens, lengths)


def rows_of(prompt: Prompt, tokenizer: Any, vocab_size: int, *, begins: bool) -> list[Int[np.ndarray, "_"]]:
    """The ids of each row of a prompt.

    Args:
        prompt: a string, a list of strings, a list of ids, ragged lists of ids, or an integer array [N] or [B, N].
        begins: whether the text begins here, so that the tokenizer adds its special tokens.

    Raises:
        ValueError: for an empty batch or row, text without a tokenizer, what is no integer, or ids outside the
            vocabulary.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    elif hasattr(prompt, "__array__"):
        prompt = np.atleast_1d(prompt)  # of an array on a device every row would be a compiled slice
    elif not isinstance(prompt, list | tuple):
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}; accepted are a string, a list of strings, lists of token ids, "
            "or an integer array of shape [N] or [B, N]"
        )
    if len(prompt) == 0:
        raise ValueError("an empty prompt; accepted is at least one row of at least one token")
    if isinstance(prompt[0], str):
        if tokenizer is None:
            raise ValueError("a prompt of text needs tokenizer=; without one, give token ids")
        rows = [np.asarray(tokenizer(text, add_special_tokens=begins)["input_ids"]) for text in prompt]
    elif isinstance(prompt[0], list | tuple) or np.ndim(prompt[0]) > 0:
        rows = [_array(row) for row in prompt]
    else:
        rows = [_array(prompt)]
    for i, row in enumerate(rows):
        if row.size == 0:
            raise ValueError(f"row {i} of the prompt is empty; accepted is at least one token")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(f"row {i} of the prompt is {row.dtype} of shape {row.shape}; accepted are integers [N]")
        if row.min() < 0 or row.max() >= vocab_size:
            worst = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"row {i} of the prompt holds the id {worst}; accepted are 0 .. {vocab_size - 1}")
    return rows


def _array(row: Any) -> np.ndarray:
    try:
        return np.asarray(row)
    except ValueError:  # lists of different lengths inside
        return np.asarray(row, dtype=object)
