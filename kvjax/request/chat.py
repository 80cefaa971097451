"""Chat messages: what they may be, and the text that a checkpoint's chat template makes of them, within limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from kvjax.checks import cut, shown

Message: TypeAlias = Mapping[str, Any]  # with "role" and "content"; other keys are for the chat template
Messages: TypeAlias = Sequence[Message]
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


def conversations_of(prompt: Any) -> Sequence[Any] | None:
    """Returns one conversation per row if the prompt consists of chat messages, else None."""
    first = prompt[0]
    if isinstance(first, Mapping):
        return [prompt]
    batched = isinstance(first, list | tuple) and any(isinstance(message, Mapping) for message in first)
    return prompt if batched else None


def in_template(
    name: str, conversations: Sequence[Any], tokenizer: Any, answered: bool, options: TemplateOptions
) -> list[str]:
    """Returns the conversations of a prompt as the chat template renders them, with all special tokens."""
    if tokenizer is None:
        raise ValueError(f"{name} consists of chat messages and there is no tokenizer: expected tokenizer=")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{name} consists of chat messages and the tokenizer has no chat template: expected text or token ids"
        )
    return [rendered(messages, tokenizer, answered, options) for messages in conversations]


def check_template_options(options: Any, name: str, *, messages: bool) -> None:
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
            f"chat_template_kwargs={shown(dict(options))} and {name} has no chat messages: expected messages, "
            "because only they go through the chat template"
        )


def check_messages(row: str, messages: Any) -> None:
    """Raises ValueError for what are no chat messages. The error names the row of the prompt as given."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f"{row} is {shown(messages)} beside rows of chat messages: expected a list of at least one message"
        )
    for i, message in enumerate(messages):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"message {i} of {row} is {shown(message)}: expected a dict whose 'role' and 'content' are strings"
            )
        for field in fields:
            check_text(f"message {i} of {row}", field)


def check_text(name: str, text: Any) -> None:
    """Raises ValueError for what is no text, or has no form in UTF-8, such as bytes of a file in another encoding."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {shown(text)} beside rows of text: expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = hex(ord(text[error.start]))
        raise ValueError(f"{name} has the lone surrogate {found} at {error.start}: expected text in UTF-8") from None


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


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block of Python code that takes longer.

    The clock is read between two lines of Python, in the calling thread only. If a debugger or a coverage tool traces
    the thread already, the block has no limit.
    """
    if sys.gettrace() is not None:
        yield
        return
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"no end within {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
