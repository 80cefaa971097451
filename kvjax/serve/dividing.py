"""Divides the text of an answer, as it comes, into content, reasoning and calls of tools.

Text that may begin a marker is held back until that is decided. A call begins as soon as its name and the brace that
opens its arguments are there; from there on, its arguments are passed on as they are written. What has the markers of a
call and does not begin so is content as it stands, so that nothing is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class Call(NamedTuple):
    """A call of a tool, or more of the arguments of the call before.

    Attributes:
        name: of the function; None for more of the arguments of the call before.
        arguments: text, in JSON if the model has written such.
    """

    name: str | None
    arguments: str


class Said(NamedTuple):
    """A part of an answer. Content follows reasoning, and calls follow content."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def then(self, more: Said) -> Said:
        """This part and one that follows it."""
        content, reasoning = self.content + more.content, self.reasoning + more.reasoning
        if self.calls and more.calls and more.calls[0].name is None:
            (*before, last), (first, *after) = self.calls, more.calls
            return Said(content, reasoning, (*before, Call(last.name, last.arguments + first.arguments), *after))
        return Said(content, reasoning, self.calls + more.calls)


class Divider(ABC):
    """Divides the text of one answer."""

    @abstractmethod
    def add(self, text: str, *, last: bool) -> Said:
        """Returns what is certain after some more text; after the last text, all that was held back."""


class Plain(Divider):
    """All text is content."""

    def add(self, text: str, *, last: bool) -> Said:
        return Said(text)


def split(text: str, marker: str, *, last: bool) -> tuple[str, str | None, str]:
    """Returns the text before a marker, the text after it, and what may begin a marker and must be held back.

    Without a marker the second is None. With the last text nothing is held back.
    """
    before, found, after = text.partition(marker)
    if found:
        return before, after, ""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    held = 0 if last else next((n for n in sizes if text.endswith(marker[:n])), 0)
    return text[: len(text) - held], None, text[len(text) - held :]


class Thinking(Divider):
    """Text from `<think>` to `</think>` is reasoning, and another divider divides what follows."""

    OPENS, CLOSES = "<think>", "</think>"

    def __init__(self, inner: Divider, *, begun: bool) -> None:
        """A divider of one answer.

        Args:
            inner: divides what follows.
            begun: whether the prompt ends with `<think>`.
        """
        self._inner, self._held = inner, ""
        self._state = "inside" if begun else "before"

    def add(self, text: str, *, last: bool) -> Said:
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state == "before":
            begins = text.lstrip()
            if begins.startswith(self.OPENS):
                self._state, text = "inside", begins[len(self.OPENS) :]
            elif self.OPENS.startswith(begins) and not last:
                self._held = text
                return Said()
            else:
                self._state = "after"
        if self._state == "inside":
            reasoning, after, self._held = split(text, self.CLOSES, last=last)
            if after is None:
                return Said(reasoning=reasoning).then(self._inner.add("", last=last))
            self._state, text = "between", after
        if self._state == "between":  # the blank lines before the content
            text = text.lstrip()
            if text:
                self._state = "after"
        return Said(reasoning=reasoning).then(self._inner.add(text, last=last))
