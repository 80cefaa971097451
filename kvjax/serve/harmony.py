"""The channels of gpt-oss: analysis is reasoning, and messages to functions are calls."""

from __future__ import annotations

import re
from typing import Any

from .dividing import Divider, Said, split
from .writing import NOTHING, Writing

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
        self._call: Writing | None = None  # that is this message

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
                function = _FUNCTION.search(head)
                self._call = Writing(NOTHING, function[1]) if function else None
            body, ended, self._held = self._body(text, last)
            said = said.then(self._said(body, ended=last or ended is not None))
            if ended is None:
                return said
            self._head, text = None, ended

    @staticmethod
    def _body(text: str, last: bool) -> tuple[str, str | None, str]:
        """The text of a message, what follows it, and what may begin its end. The second is None before the end."""
        if found := _ENDS.search(text):
            return text[: found.start()], text[found.start() :], ""
        body, _, held = max((split(text, name, last=last) for name in NAMES), key=lambda parts: len(parts[2]))
        return body, None, held

    def _said(self, body: str, *, ended: bool) -> Said:
        """Returns what some more text of a message says, and what is left of a call that has ended."""
        assert self._head is not None
        if (call := self._call) is not None:
            calls = call.add(body)
            if ended and call.is_blank:  # a function without arguments
                calls = call.add("{}")
            return Said(call.content(self._head + MESSAGE, "") if ended else "", calls=calls)
        channel = _CHANNEL.search(self._head)
        return Said(reasoning=body) if channel is not None and channel[1] == "analysis" else Said(body)


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates of gpt-oss read it: reasoning is `thinking`.

    Before a call the template has one place for reasoning and content. If a message has both, the content follows the
    reasoning there.
    """
    known = {name: value for name, value in message.items() if name != "reasoning_content"}
    if known == message:
        return message
    thinking = message["reasoning_content"]
    if message.get("tool_calls") and message["content"]:
        return known | {"thinking": f"{thinking}\n\n{message['content']}", "content": ""}
    return known | {"thinking": thinking}
