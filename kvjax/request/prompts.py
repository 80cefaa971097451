"""Turns a prompt (text, chat messages or token ids, one row or several) into padded arrays of token ids. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from kvjax.checks import shown
from kvjax.request.limits import time_limit

Message: TypeAlias = Mapping[str, Any]  # with "role" and "content"; other keys are for the chat template
Messages: TypeAlias = Sequence[Message]
Prompt: TypeAlias = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Messages
    | Sequence[Messages]
    | Int[Any, "N"]
    | Int[Any, "B N"]
)

TEMPLATE_SECONDS, TEMPLATE_CHARACTERS = 5.0, 1_000_000  # limits of a chat template
EXPECTED = (
    "expected a string, a list of strings, a list of token ids, a list of such lists, an integer array of shape [N] or "
    "[B, N], a list of chat messages, or a list of such lists"
)


def rows_of(
    prompt: Prompt, tokenizer: Any, vocab_size: int, *, begins: bool, answered: bool = True
) -> list[Int[np.ndarray, "_"]]:
    """Returns the token ids of each row of a prompt.

    Args:
        prompt: a string, a list of strings, a list of ids, ragged lists of ids, an integer array [N] or [B, N], a list
            of chat messages, or a list of such lists.
        tokenizer: encodes text and renders messages. It is not needed for token ids.
        begins: whether the sequence begins with this prompt. The tokenizer adds its special tokens to text only then.
        answered: whether the model answers next. Chat messages end with the template's generation prompt only then.

    Raises:
        ValueError: for an empty batch or row, text or messages without a tokenizer, malformed messages, a chat template
            that is missing or fails, values that are not integers, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    elif hasattr(prompt, "__array__"):
        prompt = np.atleast_1d(prompt)  # every row of an array on a device would be a compiled slice
    elif not isinstance(prompt, list | tuple):
        raise ValueError(f"the prompt is of type {type(prompt).__name__}: {EXPECTED}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: expected at least one row of at least one token")
    if (conversations := _conversations(prompt)) is not None:
        rows = [np.asarray(ids) for ids in _encode_chats(conversations, tokenizer, begins=begins, answered=answered)]
    elif isinstance(prompt[0], str):
        if tokenizer is None:
            raise ValueError("the prompt is text and there is no tokenizer: expected tokenizer=, or token ids")
        for i, text in enumerate(prompt):
            _check_text(f"row {i} of the prompt", text)
        rows = [np.asarray(tokenizer(text, add_special_tokens=begins)["input_ids"]) for text in prompt]
    elif isinstance(prompt[0], list | tuple) or np.ndim(prompt[0]) > 0:
        rows = [_array(row) for row in prompt]
    else:
        rows = [_array(prompt)]
    for i, row in enumerate(rows):
        if row.size == 0:
            raise ValueError(f"row {i} of the prompt is empty: expected at least one token")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(f"row {i} of the prompt is {row.dtype} of shape {row.shape}: expected integers [N]")
        if row.min() < 0 or row.max() >= vocab_size:
            worst = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"row {i} of the prompt contains the id {worst}: expected ids in 0 .. {vocab_size - 1}")
    return rows


def _check_text(name: str, text: Any) -> None:
    """Raises ValueError for what is no text, or has no form in UTF-8, such as bytes of a file in another encoding."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {shown(text)} beside rows of text: expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = hex(ord(text[error.start]))
        raise ValueError(f"{name} has the lone surrogate {found} at {error.start}: expected text in UTF-8") from None


def is_single(prompt: Prompt | None) -> bool:
    """Whether an accepted prompt is one row by itself: a string, a conversation, or token ids without a batch axis."""
    if prompt is None or isinstance(prompt, str):
        return prompt is not None
    if hasattr(prompt, "__array__"):
        return np.ndim(prompt) == 1
    first: Any = prompt[0]
    return isinstance(first, Mapping) or (not isinstance(first, str | list | tuple) and np.ndim(first) == 0)


def _array(row: Any) -> np.ndarray:
    try:
        return np.asarray(row)
    except ValueError:  # the row contains lists of different lengths
        return np.asarray(row, dtype=object)


def _conversations(prompt: Any) -> Sequence[Any] | None:
    """Returns one conversation per row if the prompt consists of chat messages, else None."""
    first = prompt[0]
    if isinstance(first, Mapping):
        return [prompt]
    batched = isinstance(first, list | tuple) and any(isinstance(message, Mapping) for message in first)
    return prompt if batched else None


def _encode_chats(conversations: Sequence[Any], tokenizer: Any, *, begins: bool, answered: bool) -> list[list[int]]:
    """Returns the ids of the conversations as the chat template renders them.

    A template writes the special tokens that it wants, so the tokenizer adds none. Most templates begin with the BOS
    token. It is dropped from messages that continue a cache, because it stands at the beginning of that cache already.
    """
    for row, messages in enumerate(conversations):
        _check_messages(row, messages)
    if tokenizer is None:
        raise ValueError("the prompt consists of chat messages and there is no tokenizer: expected tokenizer=")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt consists of chat messages and the tokenizer has no chat template: expected text or token ids"
        )
    rows = []
    for messages in conversations:
        ids = tokenizer(rendered(messages, tokenizer, answered), add_special_tokens=False)["input_ids"]
        rows.append(ids[1:] if not begins and ids and ids[0] == tokenizer.bos_token_id else ids)
    return rows


def _check_messages(row: int, messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f"row {row} of the prompt is {shown(messages)} beside rows of chat messages: expected a list of at "
            "least one message"
        )
    for i, message in enumerate(messages):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"message {i} of row {row} is {shown(message)}: expected a dict whose 'role' and 'content' are strings"
            )
        for field in fields:
            _check_text(f"message {i} of row {row}", field)


def rendered(messages: Messages, tokenizer: Any, answered: bool) -> str:
    """Returns chat messages as the tokenizer's chat template writes them.

    Raises:
        ValueError: the template fails, takes longer than TEMPLATE_SECONDS, or writes more than four times the messages'
            contents and TEMPLATE_CHARACTERS.
    """
    try:
        with time_limit(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=answered
            )
    except Exception as error:  # a template is a program that comes with the checkpoint, so any error may come out
        raise ValueError(f"the tokenizer's chat template failed with {type(error).__name__}: {error}") from error
    most = TEMPLATE_CHARACTERS + 4 * sum(len(message["content"]) for message in messages)
    if len(text) > most:
        raise ValueError(f"the tokenizer's chat template wrote {len(text):,} characters: expected at most {most:,}")
    return text
