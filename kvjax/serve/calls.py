"""The forms in which models write calls of tools."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Any

from pydantic_core import from_json

from .dividing import Call, Divider, Said, split


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


class Hermes(Divider):
    """Any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among content: Qwen, Hermes."""

    OPENS, CLOSES = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._inside = False  # a call
        self._behind = False  # a call, of which the blank space that follows is part

    def add(self, text: str, *, last: bool) -> Said:
        text, said = self._held + text, Said()
        while True:
            if self._inside:
                body, after, self._held = split(text, self.CLOSES, last=True)
                if after is None and not last:
                    self._held = text
                    return said
                call = call_of(parsed(body))
                self._inside, self._behind, text = False, call is not None, after or ""
                as_is = self.OPENS + body + ("" if after is None else self.CLOSES)
                said = said.then(Said(as_is) if call is None else Said(calls=(call,)))
            content, after, self._held = split(text, self.OPENS, last=last)
            if self._behind:
                content = content.lstrip()
                self._behind = not content
            certain = content if last and after is None else content.rstrip()
            if after is None:
                self._held = content[len(certain) :] + self._held
                return said.then(Said(certain))
            said, self._inside, text = said.then(Said(certain)), True, after


class Ending(Divider):
    """The calls end the answer, and are read when it has ended."""

    def __init__(self) -> None:
        self._held, self._calling = "", False

    def add(self, text: str, *, last: bool) -> Said:
        text, content = self._held + text, ""
        if not self._calling:
            content, self._calling, text = self._begin(text, last)
        if not last:
            self._held = text
            return Said(content)
        calls = self._calls(text) if self._calling else None
        return Said(content + text) if calls is None else Said(content, calls=calls)

    @abstractmethod
    def _begin(self, text: str, last: bool) -> tuple[str, bool, str]:
        """Returns certain content, whether calls begin after it, and the rest of the text."""

    @abstractmethod
    def _calls(self, text: str) -> tuple[Call, ...] | None:
        """The calls; None if the text has anything else."""


class Llama(Ending):
    """An answer that is `{"name": ..., "parameters": {...}}`, or several between semicolons: Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._is_content = False

    def _begin(self, text: str, last: bool) -> tuple[str, bool, str]:
        begins = text.lstrip()
        if self._is_content or not begins:
            return (text, False, "") if self._is_content else ("", False, text)
        if begins.startswith((self.TAG, "{")):
            return "", True, text
        if self.TAG.startswith(begins):
            return "", False, text
        self._is_content = True
        return text, False, ""

    def _calls(self, text: str) -> tuple[Call, ...] | None:
        return _sequence(text.strip().removeprefix(self.TAG))


class Mistral(Ending):
    """`[TOOL_CALLS]` with a list of calls, or before each call as `NAME[ARGS]{...}`: Mistral."""

    TAG, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def _begin(self, text: str, last: bool) -> tuple[str, bool, str]:
        content, after, held = split(text, self.TAG, last=last)
        return (content, False, held) if after is None else (content, True, self.TAG + after)

    def _calls(self, text: str) -> tuple[Call, ...] | None:
        found: list[Call | None] = []
        for one in text.split(self.TAG)[1:]:
            if one.lstrip().startswith("["):
                listed = parsed(one)
                found += map(call_of, listed) if isinstance(listed, list) else [None]
            else:
                named = re.fullmatch(r"\s*([\w.-]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(\s*\{.*)", one, re.DOTALL)
                found.append(named and call_of({"name": named[1], "arguments": parsed(named[2])}))
        return _complete(found)


def _sequence(text: str) -> tuple[Call, ...] | None:
    """The calls that documents between semicolons or blank space are."""
    decoder, found, at = json.JSONDecoder(), list[Call | None](), 0
    while rest := text[at:].lstrip(" \n\t;"):
        at = len(text) - len(rest)
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        found.append(call_of(parsed(text[len(text) - len(rest) : at])))
    return _complete(found)


def _complete(found: list[Call | None]) -> tuple[Call, ...] | None:
    calls = tuple(call for call in found if call is not None)
    return calls if calls and len(calls) == len(found) else None
