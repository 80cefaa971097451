"""Turns a prompt (text, chat messages or token ids, one row or several) into padded arrays of token ids. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from kvjax.checks import cut, shown
from kvjax.request.limits import time_limit
from kvjax.request.padding import check_encoding, without_pad_tokens, without_padding

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
    | Mapping[str, Any]
)

TemplateOptions: TypeAlias = Mapping[str, Any] | None

TEMPLATE_SECONDS, TEMPLATE_CHARACTERS = 5.0, 1_000_000  # limits of a chat template
TAKEN = {  # arguments of `apply_chat_template` that are not for the template
    "conversation",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
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
) -> list[Int[np.ndarray, "_"]]:
    """Returns the token ids of each row of a prompt.

    Args:
        prompt: a string, a list of strings, a list of ids, ragged lists of ids, an integer array [N] or [B, N], what a
            tokenizer returns, a list of chat messages, or a list of such lists.
        tokenizer: encodes text and renders messages. It is not needed for token ids.
        begins: whether the sequence begins with this prompt. The tokenizer adds its special tokens to text only then.
        answered: whether the model answers next. Chat messages end with the template's generation prompt only then.
        chat_template_kwargs: options of the chat template, see `check_template_options`.

    Raises:
        ValueError: for an empty batch or row, text or messages without a tokenizer, malformed messages, a chat template
            that is missing or fails, options without messages, values that are not integers, ids outside the
            vocabulary, or padding without a mask.
    """
    mask = None
    if isinstance(prompt, Mapping):
        check_encoding(prompt)
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask")
    if isinstance(prompt, str):
        prompt = [prompt]
    elif hasattr(prompt, "__array__"):
        prompt = np.atleast_1d(prompt)  # every row of an array on a device would be a compiled slice
    elif not isinstance(prompt, list | tuple):
        raise ValueError(f"the prompt is of type {type(prompt).__name__}: {EXPECTED}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: expected at least one row of at least one token")
    conversations = _conversations(prompt)
    check_template_options(chat_template_kwargs, messages=conversations is not None)
    given = False  # whether the caller gave ids
    if conversations is not None:
        texts = _in_template(conversations, tokenizer, answered, chat_template_kwargs)
        rows = [encoded(text, tokenizer, begins=begins, written=True) for text in texts]
    elif isinstance(prompt[0], str):
        if tokenizer is None:
            raise ValueError("the prompt is text and there is no tokenizer: expected tokenizer=, or token ids")
        for i, text in enumerate(prompt):
            _check_text(f"row {i} of the prompt", text)
        rows = [encoded(text, tokenizer, begins=begins) for text in prompt]
    else:
        given, rows = True, _id_rows(prompt)
    if mask is not None:
        rows = without_padding(rows, _id_rows(mask))
    elif given and tokenizer is not None and all(row.ndim == 1 for row in rows):
        rows = without_pad_tokens(rows, tokenizer)
    for i, row in enumerate(rows):
        if row.size == 0:
            raise ValueError(f"row {i} of the prompt is empty: expected at least one token")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(f"row {i} of the prompt is {row.dtype} of shape {row.shape}: expected integers [N]")
        if row.min() < 0 or row.max() >= vocab_size:
            worst = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"row {i} of the prompt contains the id {worst}: expected ids in 0 .. {vocab_size - 1}")
    return rows


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
        raise ValueError(f"the tokenizer cannot encode the prompt {shown(text)}: {cut(str(error))}") from error
    if adds:
        added = np.asarray(tokenizer("")["input_ids"])
        starts = (n for n in range(added.size, 0, -1) if np.array_equal(ids[: 2 * n], np.tile(added[:n], 2)))
        return ids[next(starts, 0) :]
    bos = tokenizer.bos_token_id
    return ids[1:] if not begins and ids.size and bos is not None and ids[0] == bos else ids


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
    if isinstance(prompt, Mapping):
        prompt = prompt["input_ids"]
    if hasattr(prompt, "__array__"):
        return np.ndim(prompt) == 1
    rows: Any = prompt
    first = rows[0]
    return isinstance(first, Mapping) or (not isinstance(first, str | list | tuple) and np.ndim(first) == 0)


def _id_rows(ids: Any) -> list[np.ndarray]:
    """Returns one array per row of ids, or of a mask."""
    ids = np.atleast_1d(ids) if hasattr(ids, "__array__") else ids
    rows = ids if len(ids) and (isinstance(ids[0], list | tuple) or np.ndim(ids[0]) > 0) else [ids]
    return [_array(row) for row in rows]


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


def _in_template(conversations: Sequence[Any], tokenizer: Any, answered: bool, options: TemplateOptions) -> list[str]:
    """Returns the conversations as the chat template renders them, with all special tokens."""
    for row, messages in enumerate(conversations):
        _check_messages(row, messages)
    if tokenizer is None:
        raise ValueError("the prompt consists of chat messages and there is no tokenizer: expected tokenizer=")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt consists of chat messages and the tokenizer has no chat template: expected text or token ids"
        )
    return [rendered(messages, tokenizer, answered, options) for messages in conversations]


def check_template_options(options: Any, *, messages: bool) -> None:
    """Raises ValueError unless `options` are None, or for messages a dict of options such as `enable_thinking`.

    The template reads each under its name; `tools` and `documents` are those of transformers.
    """
    if options is None:
        return
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"chat_template_kwargs={shown(options)}: expected a dict of the template's options by name")
    if taken := [name for name in options if name in TAKEN]:
        raise ValueError(
            f"chat_template_kwargs has {taken[0]!r}, which kvjax sets: expected the template's own options, such as "
            "enable_thinking"
        )
    if options and not messages:
        raise ValueError(
            f"chat_template_kwargs={shown(dict(options))} and the prompt has no chat messages: expected messages, "
            "because only they go through the chat template"
        )


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


def rendered(messages: Messages, tokenizer: Any, answered: bool, options: TemplateOptions = None) -> str:
    """Returns chat messages as the tokenizer's chat template writes them, given its options.

    Raises:
        ValueError: the template fails, takes longer than TEMPLATE_SECONDS, or writes more than four times the messages'
            contents and TEMPLATE_CHARACTERS.
    """
    try:
        with time_limit(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answered,
                **(options or {}),
            )
    except Exception as error:  # a template is a program that comes with the checkpoint, so any error may come out
        message = f"the tokenizer's chat template failed with {type(error).__name__}: {cut(str(error))}"
        raise ValueError(message) from error
    most = TEMPLATE_CHARACTERS + 4 * sum(len(message["content"]) for message in messages)
    if len(text) > most:
        raise ValueError(f"the tokenizer's chat template wrote {len(text):,} characters: expected at most {most:,}")
    return text
