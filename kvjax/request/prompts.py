"""Turns a prompt (text, chat messages or token ids, one row or several) into padded arrays of token ids. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from kvjax.checks import cut, shown
from kvjax.request.chat import (
    Messages,
    TemplateOptions,
    check_messages,
    check_template_options,
    check_text,
    conversations_of,
    in_template,
)
from kvjax.request.padding import check_encoding, without_pad_tokens, without_padding

Prompt: TypeAlias = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Messages
    | Sequence[Messages]
    | Int[Any, "N"]
    | Int[Any, "B N"]
    | Mapping[str, Any]
)

EXPECTED = (
    "expected a string, a list of strings, a list of token ids, a list of such lists, an integer array of shape [N] or "
    "[B, N], what tokenizer(text) returns, a list of chat messages, or a list of such lists"
)


def rows_of(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    *,
    begins: bool,
    answered: bool = True,
    chat_template_kwargs: TemplateOptions = None,
    name: str = "the prompt",
) -> list[Int[np.ndarray, "_"]]:
    """Returns the token ids of each row of a prompt, int32.

    Args:
        prompt: a string, a list of strings, a list of ids, ragged lists of ids, an integer array [N] or [B, N], what a
            tokenizer returns, a list of chat messages, or a list of such lists.
        tokenizer: encodes text and renders messages. It is not needed for token ids.
        begins: whether the sequence begins with this prompt. The tokenizer adds its special tokens to text only then.
        answered: whether the model answers next. Chat messages end with the template's generation prompt only then.
        chat_template_kwargs: options of the chat template, see `check_template_options`.
        name: what the messages of errors call the prompt.

    Raises:
        ValueError: for an empty batch or row, text or messages without a tokenizer, malformed messages, a chat template
            that is missing or fails, options without messages, values that are not integers, ids outside the
            vocabulary, or padding without a mask.
    """
    encoding = prompt if isinstance(prompt, Mapping) else {}
    if encoding:
        check_encoding(name, encoding)
        prompt = encoding["input_ids"]
    if hasattr(prompt, "__array__") and np.ndim(prompt) > 0:
        prompt = np.asarray(prompt)  # every row of an array on a device would be a compiled slice
    elif not isinstance(prompt, str | list | tuple):
        raise ValueError(f"{name} is of type {type(prompt).__name__}: {EXPECTED}")
    given: Any = [prompt] if isinstance(prompt, str) else prompt
    if len(given) == 0:
        raise ValueError(f"{name} is empty: expected at least one row of at least one token")
    names = [name] if is_single(prompt) else [f"row {i} of {name}" for i in range(len(given))]
    conversations = None if encoding else conversations_of(given)
    check_template_options(chat_template_kwargs, name, messages=conversations is not None)
    if conversations is not None:
        for each, messages in zip(names, conversations, strict=True):
            check_messages(each, messages)
        texts = in_template(name, conversations, tokenizer, answered, chat_template_kwargs)
        rows = [encoded(text, tokenizer, begins=begins, written=True) for text in texts]
    elif isinstance(given[0], str) and not encoding:
        if tokenizer is None:
            raise ValueError(f"{name} is text and there is no tokenizer: expected tokenizer=, or token ids")
        for each, text in zip(names, given, strict=True):
            check_text(each, text)
        rows = [encoded(text, tokenizer, begins=begins) for text in given]
    else:
        rows = _id_rows(given)
        if encoding.get("attention_mask") is not None:
            rows = without_padding(rows, _id_rows(encoding["attention_mask"]))
        elif tokenizer is not None and all(row.ndim == 1 for row in rows):
            rows = without_pad_tokens(name, names, rows, tokenizer)
    for each, row in zip(names, rows, strict=True):
        if row.size == 0:
            raise ValueError(f"{each} is empty: expected at least one token")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(f"{each} is {row.dtype} of shape {row.shape}: expected integers [N]")
        if row.min() < 0 or row.max() >= vocab_size:
            worst = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"{each} contains the id {worst}: expected ids in 0 .. {vocab_size - 1}")
    return [row.astype(np.int32) for row in rows]


def encoded(text: str, tokenizer: Any, *, begins: bool, written: bool = False) -> Int[np.ndarray, "_"]:
    """Returns the token ids of a text, with special tokens at its beginning once.

    Text of a chat template begins with the special tokens that the tokenizer would add, and these are not added again.
    In a text that continues another, a BOS token at its beginning is dropped.

    Args:
        begins: whether the sequence begins with this text.
        written: whether the text has all its special tokens.
    """
    adds = begins and not written
    try:
        ids = np.asarray(tokenizer(text, add_special_tokens=adds)["input_ids"])
    except Exception as error:  # tokenizers without a token for what they do not know; their errors have no class
        raise ValueError(f"the tokenizer cannot encode the text {shown(text)}: {cut(str(error))}") from error
    if adds:
        added = np.asarray(tokenizer("")["input_ids"])
        starts = (n for n in range(added.size, 0, -1) if np.array_equal(ids[: 2 * n], np.tile(added[:n], 2)))
        return ids[next(starts, 0) :]
    bos = tokenizer.bos_token_id
    return ids[1:] if not begins and ids.size and bos is not None and ids[0] == bos else ids


def is_single(prompt: Prompt | None) -> bool:
    """Returns whether a prompt is one row by itself: a string, a conversation, or token ids without a batch axis."""
    if prompt is None or isinstance(prompt, str):
        return prompt is not None
    rows: Any = prompt["input_ids"] if isinstance(prompt, Mapping) else prompt
    if hasattr(rows, "__array__"):
        rows = np.asarray(rows)
    first = rows[0]
    return isinstance(first, Mapping) or (not isinstance(first, str | list | tuple) and np.ndim(first) == 0)


def _id_rows(ids: Any) -> list[np.ndarray]:
    """Returns one array per row of ids, or of a mask."""
    ids = np.atleast_1d(ids) if hasattr(ids, "__array__") else ids
    rows = ids if len(ids) and not is_single(ids) else [ids]
    return [_array(row) for row in rows]


def _array(row: Any) -> np.ndarray:
    if isinstance(row, list | tuple) and {int, bool} <= set(map(type, row)):
        return np.asarray(row, dtype=object)  # NumPy would make integers of truth values
    try:
        return np.asarray(row)
    except ValueError:  # the row contains lists of different lengths
        return np.asarray(row, dtype=object)
