"""One call of a tool while a model writes it: its arguments are passed on as they are written."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from .dividing import Call

# What comes before the brace that opens the arguments.
OBJECT = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
NOTHING = re.compile(r"\s*")


def parsed(text: str) -> Any:
    """A JSON document; None if the text is none."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def call_of(document: Any) -> Call | None:
    """The call that a JSON document is: an object with a name, and with arguments (or parameters) that are an object.

    Arguments may also be the text of an object, as OpenAI writes them.
    """
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(document["name"], json.dumps(arguments, ensure_ascii=False))


class Writing:
    """A call while its text comes.

    If its text begins with a head and a brace, the call begins there, and the text up to the closing brace is said as
    it comes: it is JSON only if the model writes JSON. Any other text is a call if it turns out to be one, as
    `call_of` reads it, when its last brace is closed.

    Attributes:
        is_call: whether anything has been said.
        is_complete: whether the last brace has been closed.
        rest: the text after that.
    """

    def __init__(self, head: re.Pattern[str], name: str | None = None) -> None:
        """A call of which nothing is written yet.

        Args:
            head: matches the text before the arguments, with the name as the group `quoted`, in JSON, or `plain`.
            name: of the function, for a head without it.
        """
        self.is_call = self.is_complete = False
        self.rest = ""
        self._head, self._name = head, name
        self._text = ""  # up to the last brace
        self._seen = self._said = self._depth = 0
        self._quoted = self._escaped = False
        self._level = -1  # the depth at which the arguments begin, and at which they end
        self._ended: int | None = None  # where they end

    def add(self, text: str) -> tuple[Call, ...]:
        """Returns what is said with some more text."""
        if self.is_complete:
            self.rest += text
            return ()
        self._text += text
        while self._seen < len(self._text) and not self.is_complete:
            self._look(self._seen)
            self._seen += 1
        self._text, self.rest = self._text[: self._seen], self._text[self._seen :]
        if self._level >= 0:
            return self._more()
        if self.is_complete and (call := call_of(parsed(self._text))) is not None:
            self.is_call = True
            return (call,)
        return ()

    @property
    def is_blank(self) -> bool:
        """Returns whether nothing is written yet."""
        return not self._text.strip()

    def content(self, before: str, after: str) -> str:
        """Returns what of the text is content, when there will be no more.

        Args:
            before: the marker before the text.
            after: the marker after it.
        """
        if self.is_call:
            left = self.rest if self.is_complete or self._ended is None else self._text[self._ended :]
            return left if left.strip() else ""
        return before + self._text + self.rest + after

    def _look(self, at: int) -> None:
        """Follows the strings and braces of the text by one character."""
        character = self._text[at]
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = character == "\\", character != '"'
        elif character == '"':
            self._quoted = True
        elif character == "{":
            if self._level < 0:
                self._begin(at)
            self._depth += 1
        elif character == "}":
            self._depth -= 1
            if self._depth == self._level and self._ended is None:
                self._ended = at + 1
            self.is_complete = self._depth <= 0

    def _begin(self, at: int) -> None:
        """Begins the arguments at a brace, if it follows a head."""
        if (found := self._head.fullmatch(self._text, 0, at)) is None:
            return
        named = found.groupdict()
        name = self._name or named.get("plain") or parsed(named.get("quoted") or "")
        if isinstance(name, str):
            self._name, self._level, self._said = name, self._depth, at

    def _more(self) -> tuple[Call, ...]:
        """The arguments that have come since the last time. The first of them have the name."""
        until = len(self._text) if self._ended is None else self._ended
        new, self._said = self._text[self._said : until], until
        name, self.is_call = None if self.is_call else self._name, True
        return (Call(name, new),) if new else ()
