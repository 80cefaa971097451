"""The forms in which models write calls of tools among content."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from .dividing import Divider, Said, split
from .writing import OBJECT, Writing


class Calling(Divider):
    """Content and calls by turns. Blank space after a call is part of it."""

    HEAD: ClassVar[re.Pattern[str]] = OBJECT
    CLOSES: ClassVar[str | None] = None  # the marker after a call; without one its last brace ends it

    def __init__(self) -> None:
        self._held = ""
        self._opened = ""  # the text before the call that is written
        self._call: Writing | None = None
        self._before: bool | None = None  # whether what was opened before was a call; None before the first

    def add(self, text: str, *, last: bool) -> Said:
        text, said, self._held = self._held + text, Said(), ""
        while True:
            if self._call is None:
                content, opened, text = self._open(text, last)
                said = said.then(Said(content))
                if opened is None:
                    self._held = text
                    return said
                self._call, self._opened = Writing(self.HEAD), opened
            call, closes = self._call, self.CLOSES
            body, after, self._held = (text, None, "") if closes is None else split(text, closes, last=last)
            said = said.then(Said(calls=call.add(body)))
            if closes is None and call.is_complete:
                after, call.rest = call.rest, ""
            if after is None and not last:
                return said
            said = said.then(Said(call.content(self._opened, "" if after is None else closes or "")))
            self._call, self._before, text = None, call.is_call, after or ""

    @abstractmethod
    def _open(self, text: str, last: bool) -> tuple[str, str | None, str]:
        """Returns content, the text that opens a call, and what follows; or content, None, and what is held back."""

    def _after(self, content: str) -> str:
        """Content that follows a call, without blank space before it."""
        if self._before:
            content = content.lstrip()
            self._before = None if content else self._before
        return content


class Hermes(Calling):
    """Any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among content: Qwen, Hermes."""

    OPENS, CLOSES = "<tool_call>", "</tool_call>"

    def _open(self, text: str, last: bool) -> tuple[str, str | None, str]:
        content, after, held = split(text, self.OPENS, last=last)
        content = self._after(content)
        certain = content if last and after is None else content.rstrip()
        if after is None:
            return certain, None, content[len(certain) :] + held
        return certain, self.OPENS, after


class Llama(Calling):
    """An answer that is `{"name": ..., "parameters": {...}}`, or several between semicolons: Llama 3."""

    TAG = "<|python_tag|>"
    _OPENS = re.compile(r"[\s;]*(?:<\|python_tag\|>\s*)?")

    def __init__(self) -> None:
        super().__init__()
        self._is_content = False

    def _open(self, text: str, last: bool) -> tuple[str, str | None, str]:
        opening = self._OPENS.match(text)
        assert opening is not None
        rest = text[opening.end() :]
        self._is_content = self._is_content or self._before is False
        if not self._is_content:
            if rest.startswith("{"):
                return "", opening[0], rest
            if not last and self.TAG.startswith(rest):
                return "", None, text
            if self._before and not text.strip("; \n\t"):
                return "", None, ""
        self._is_content = True
        return text, None, ""


class Mistral(Calling):
    """`[TOOL_CALLS]` with a list of calls, or before each call as `NAME[ARGS]{...}`: Mistral."""

    TAG, ARGS = "[TOOL_CALLS]", "[ARGS]"
    HEAD = re.compile(rf"{OBJECT.pattern}|\s*(?P<plain>[\w.-]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*")

    def __init__(self) -> None:
        super().__init__()
        self._listed = False  # whether a list goes on

    def _open(self, text: str, last: bool) -> tuple[str, str | None, str]:
        if self._listed:
            begins = text.lstrip(", \n\t")
            if self._before and not begins:
                return "", None, "" if last else text
            if self._before and begins.startswith("{"):
                return "", text[: len(text) - len(begins)], begins
            self._listed = False
            text = begins.removeprefix("]") if self._before else text
        content, after, held = split(text, self.TAG, last=last)
        content = self._after(content)
        if after is None:
            return content, None, held
        begins = after.lstrip()
        inside = begins[1:].lstrip() if begins.startswith("[") else begins
        if not inside:
            return (content + self.TAG + after, None, "") if last else (content, None, self.TAG + after)
        self._listed = begins.startswith("[")
        return content, self.TAG + after[: len(after) - len(inside)], inside
