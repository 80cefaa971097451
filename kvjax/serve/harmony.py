"""The channels of gpt-oss: analysis is reasoning, and messages to functions are calls."""

from __future__ import annotations

import re

from .calls import call_of, parsed
from .dividing import Divider, Said, split

MESSAGE = "<|message|>"
NAMES = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, "<|end|>", "<|call|>", "<|return|>")
_ENDS = re.compile(r"<\|(?:start|channel|end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class Harmony(Divider):
    """`<|channel|>CHANNEL to=functions.NAME <|constrain|>json<|message|>TEXT<|end|>`, any number of messages."""

    def __init__(self) -> None:
        self._held = ""
        self._head: str | None = None  # of the message whose text comes; None in a head

    def add(self, text: str, *, last: bool) -> Said:
        text, said = self._held + text, Said()
        while True:
            if self._head is None:
                head, after, _ = split(text, MESSAGE, last=True)
                if after is None:
                    self._held = text
                    spoken = last and not any(name in text for name in NAMES)
                    return said.then(Said(text)) if spoken else said
                self._head, text = head, after
            body, ended, rest = self._body(text, last)
            function = _FUNCTION.search(self._head)
            if function and ended is None and not last:
                self._held = text
                return said
            said = said.then(self._said(self._head, function and function[1], body))
            if ended is None:
                self._held = rest
                return said
            self._head, text = None, ended

    @staticmethod
    def _body(text: str, last: bool) -> tuple[str, str | None, str]:
        """The text of a message, what follows it, and what may begin its end. The second is None before the end."""
        if found := _ENDS.search(text):
            return text[: found.start()], text[found.start() :], ""
        body, _, held = max((split(text, name, last=last) for name in NAMES), key=lambda parts: len(parts[2]))
        return body, None, held

    @staticmethod
    def _said(head: str, function: str | None, body: str) -> Said:
        if function is not None:
            call = call_of({"name": function, "arguments": parsed(body or "{}")})
            return Said(head + MESSAGE + body) if call is None else Said(calls=(call,))
        channel = _CHANNEL.search(head)
        return Said(reasoning=body) if channel is not None and channel[1] == "analysis" else Said(body)
