"""The forms in which a checkpoint writes calls and reasoning, as far as its chat template and vocabulary tell."""

from __future__ import annotations

import json
import secrets
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from kvjax.decoding.grammars import Grammar
from kvjax.decoding.row_text import special_ids
from kvjax.request.chat import rendered

from . import grammars
from .calls import Hermes, Llama, Mistral
from .dividing import Divider, Plain, Thinking
from .grammars import Writer
from .harmony import NAMES, Harmony, shown

CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Dialect:
    """A form of calls.

    Attributes:
        name: as the option of the server names it.
        sign: a text that chat templates of the form have.
        divider: divides an answer that may have calls.
        grammar: writes the expression of calls in a grammar.
        markers: special tokens that the divider reads.
        always: whether answers without tools have the form too.
        digits: the number of characters of a call's id.
        shown: makes a message with `reasoning_content` one that templates of the form read; None if they read that.
    """

    name: str
    sign: str
    divider: Callable[[], Divider]
    grammar: Callable[..., str]
    markers: tuple[str, ...] = ()
    always: bool = False
    digits: int = 24
    shown: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def call_id(self) -> str:
        """A new name of a call. Templates of Mistral accept nine letters and digits."""
        drawn = "".join(secrets.choice(CHARACTERS) for _ in range(self.digits))
        return drawn if self.digits == 9 else f"call_{drawn}"


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("harmony", "<|channel|>", Harmony, grammars.harmony, NAMES, always=True, shown=shown),
        Dialect("hermes", "<tool_call>", Hermes, grammars.hermes, (Hermes.OPENS, Hermes.CLOSES)),
        Dialect(
            "mistral", "[TOOL_CALLS]", Mistral, grammars.mistral, (Mistral.TAG, Mistral.ARGS, "[CALL_ID]"), digits=9
        ),
        Dialect("llama", "<|python_tag|>", Llama, grammars.llama, (Llama.TAG,)),
    )
}  # in the order in which templates are searched for their signs


@dataclass(frozen=True)
class Reading:
    """The way in which the answers to one request are read.

    Attributes:
        divider: makes the divider of an answer.
        markers: special tokens that the text of an answer shows.
        call_id: makes the name of a call.
        most_calls: the most calls of an answer; those after them are dropped.
    """

    divider: Callable[[], Divider] = Plain
    markers: tuple[str, ...] = ()
    call_id: Callable[[], str] = DIALECTS["hermes"].call_id
    most_calls: int = sys.maxsize


@dataclass(frozen=True)
class Template:
    """The facts that the chat template of a checkpoint tells of its answers.

    Attributes:
        tokenizer: has the template.
        dialect: the form of calls; None if it cannot be told.
        text: the template; empty if there is none.
    """

    tokenizer: Any
    dialect: Dialect | None
    text: str = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Any, name: str | None = None) -> Template:
        """The facts that the template of a tokenizer tells. A dialect may be given by name."""
        given = getattr(tokenizer, "chat_template", None) or ""
        text = given if isinstance(given, str) else "".join(given.values())
        if name is not None:
            return cls(tokenizer, DIALECTS[name], text)
        return cls(tokenizer, next((dialect for dialect in DIALECTS.values() if dialect.sign in text), None), text)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The names of all special tokens."""
        return tuple(special_ids(self.tokenizer))

    def shown(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template reads them, given those with `reasoning_content`."""
        if self.dialect is None or self.dialect.shown is None:
            return messages
        return [*map(self.dialect.shown, messages)]

    def check(self, *, tools: bool, calls: bool) -> None:
        """Raises ValueError if the model cannot be shown what a request has, or its calls cannot be read.

        Args:
            tools: whether the model may call tools.
            calls: whether messages have calls.
        """
        if tools and "tools" not in self.text:
            raise ValueError(
                "tools are given, and the chat template of this model shows none: expected a request without tools, or "
                "a server with --chat-template"
            )
        if tools and self.dialect is None:
            raise ValueError(
                "tools are given, and the chat template of this model does not tell how it writes calls: expected a "
                f"server with --tool-calls, which is one of {', '.join(DIALECTS)}"
            )
        if calls and "tool_calls" not in self.text:
            raise ValueError(
                "messages have tool_calls, and the chat template of this model shows none: expected messages without"
            )

    def reading(self, *, tools: bool, options: Mapping[str, Any], most_calls: int) -> Reading:
        """The way in which answers to a chat are read.

        Args:
            tools: whether the model may call tools.
            options: of the chat template.
            most_calls: the most calls of an answer.
        """
        found = Reading(most_calls=most_calls)
        if (dialect := self.dialect) is not None and (tools or dialect.always):
            found = Reading(dialect.divider, dialect.markers, dialect.call_id, most_calls)
        names, divider = found.markers, found.divider
        if self._thinks:
            begun = self._begins_inside(options)
            names, divider = (*names, Thinking.OPENS, Thinking.CLOSES), lambda: Thinking(found.divider(), begun=begun)
        special = special_ids(self.tokenizer) if names else {}
        return replace(found, divider=divider, markers=tuple(name for name in names if name in special))

    def grammar(
        self,
        content: Callable[[Writer], str] | None,
        *,
        tools: Sequence[Mapping[str, Any]],
        required: bool,
        several: bool,
        options: Mapping[str, Any],
    ) -> Grammar | None:
        """The grammar of the answers to a chat; None if they are free.

        Args:
            content: writes the expression of content; None if content is free.
            tools: that the model may call.
            required: whether it must call one.
            several: whether an answer may have several calls.
            options: of the chat template.
        """
        if content is None and not required:
            return None
        writer, forms, dialect = Writer(self.tokenizer), list[str](), self.dialect
        speaks = dialect is not None and dialect.always
        if dialect is not None and tools:
            forms.append(dialect.grammar(writer, tools, several=several, template=self.text))
        if content is not None and not required:
            forms.append(grammars.final(writer, content(writer)) if speaks else content(writer))
        before = grammars.analysis(writer) if speaks else ""
        if self._thinks:
            before = grammars.thought(writer, begun=self._begins_inside(options))
        return writer.grammar(f"{before} ({' | '.join(forms)})")

    @property
    def _thinks(self) -> bool:
        return Thinking.OPENS in self.text and Thinking.CLOSES in self.text

    def _begins_inside(self, options: Mapping[str, Any]) -> bool:
        """Returns whether prompts end with the beginning of reasoning, given options of the template."""
        known = {name: value for name, value in options.items() if name != "tools"}
        return _begins_inside(self.tokenizer, json.dumps(known, sort_keys=True))


@lru_cache(maxsize=64)
def _begins_inside(tokenizer: Any, options: str) -> bool:
    """Does what `Template._begins_inside` does with options as JSON."""
    try:
        text = rendered([{"role": "user", "content": "x"}], tokenizer, True, json.loads(options))
    except ValueError:  # the request itself is told what is wrong with its options
        return False
    return text.rstrip().endswith(Thinking.OPENS)
