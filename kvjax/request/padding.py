"""Rows of token ids that a tokenizer has padded: read with their attention mask, or without the padding. NumPy only."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.checks import shown

# What a tokenizer returns beside ids and mask, none of which a decoder reads.
UNREAD = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping"}


def check_encoding(name: str, encoding: Mapping[str, Any]) -> None:
    """Raises ValueError unless a mapping is what `tokenizer(text)` returns."""
    if "input_ids" not in encoding:
        raise ValueError(
            f"{name} is of type {type(encoding).__name__} with the keys {shown(list(encoding))}: expected a list "
            "of chat messages, or what tokenizer(text) returns, with 'input_ids' and 'attention_mask'"
        )
    if unknown := [name for name in encoding if name not in {"input_ids", "attention_mask"} | UNREAD]:
        raise ValueError(
            f"{name} has the key {shown(unknown[0])}: expected 'input_ids' and 'attention_mask' of a tokenizer"
        )
    for field, expected in (("input_ids", "token ids"), ("attention_mask", "a 0 or 1 for each id")):
        value = encoding.get(field)
        listed = isinstance(value, list | tuple) or hasattr(value, "__array__")
        if not listed and (value is not None or field == "input_ids"):
            raise ValueError(f"{field}={shown(value)}: expected {expected} of one row, or of several")


def without_padding(rows: Sequence[np.ndarray], mask: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the ids of each row where its attention mask is 1. Raises ValueError for a mask of another form."""
    if len(rows) != len(mask) or any(row.shape != marks.shape for row, marks in zip(rows, mask, strict=True)):
        raise ValueError("attention_mask has another shape than input_ids: expected a 0 or 1 for each id")
    kept = []
    for i, (row, marks) in enumerate(zip(rows, mask, strict=True)):
        if marks.dtype.kind not in "biu" or not np.isin(marks, (0, 1)).all():
            raise ValueError(f"row {i} of attention_mask has other values than 0 and 1: expected a 0 or 1 for each id")
        if np.count_nonzero(np.diff(marks.astype(int), prepend=0) == 1) > 1:
            raise ValueError(
                f"row {i} of attention_mask has a 0 between two 1: expected padding at the beginning and the end only"
            )
        kept.append(row[marks.astype(bool)])
    return kept


def without_pad_tokens(
    name: str, names: Sequence[str], rows: Sequence[Int[np.ndarray, "_"]], tokenizer: Any
) -> list[np.ndarray]:
    """Returns rows that have no mask without the tokenizer's padding token at their ends, and warns if there was one.

    A padding token that is also the BOS or the end token may be text: one in the place of such a token, and in every
    row if all have the same length.

    Args:
        name: what messages call the prompt.
        names: what they call each row.

    Raises:
        ValueError: for more of such tokens, because nobody can tell which of them are padding.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return list(rows)
    same_length = len({row.size for row in rows}) == 1
    specials = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    dropped, kept = 0, list(rows)
    for step, special, verb in ((1, specials[0], "begins"), (-1, specials[1], "ends")):
        runs = [_run(row[::step] == pad) for row in rows]
        if pad not in specials:
            dropped += sum(runs)
            kept = [row[::step][run:][::step] for row, run in zip(kept, runs, strict=True)]
            continue
        allowed = int(pad == special and (not same_length or min(runs) > 0))
        if (run := max(runs)) > allowed:
            raise ValueError(
                f"{names[runs.index(run)]} {verb} with {run} of the token {pad}, which is padding and a "
                "special token of texts: expected what tokenizer(texts, padding=True) returns, which has "
                '"input_ids" and "attention_mask", or lists of ids without padding'
            )
    if dropped:
        warnings.warn(
            f"{name} has {dropped} padding tokens ({pad}) at the ends of rows, which are dropped: expected what "
            'tokenizer(texts, padding=True) returns, which has "input_ids" and "attention_mask"',
            stacklevel=6,  # the caller of a public function, which `own_modes` wraps
        )
    return kept


def _run(padded: Bool[np.ndarray, "_"]) -> int:
    """The number of padding tokens that a row begins with."""
    return padded.size if padded.all() else int(np.argmin(padded))
