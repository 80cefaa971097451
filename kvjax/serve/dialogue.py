"""The part that chats and responses have in common: a dialogue through the checkpoint's chat template, and tools."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvjax.decoding.grammars import Grammar

from .dialects import Reading, Template
from .fields import Flag, Top, refused
from .functions import Choice, ToolChoice, Tools
from .schema import Common


class Dialogue(Common):
    """A request whose prompt is a dialogue.

    Attributes:
        tools: functions that the model may call, as far as tool_choice allows it.
        tool_choice: "auto" is the default. With "none" the chat template is not shown the tools.
        parallel_tool_calls: false drops all calls of an answer but the first.
        top_logprobs: with log-probabilities, returns those of so many most probable tokens too.
        chat_template_kwargs: not in OpenAI's API: options of the chat template, such as {"enable_thinking": false}.
    """

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag = None
    top_logprobs: Annotated[Top, Field(description="with logprobs, an integer from 0 to 20")] = None
    chat_template_kwargs: Annotated[
        Annotated[dict[str, Any], Field(max_length=64)] | None,
        Field(description="an object with at most 64 options of the chat template"),
    ] = None

    @model_validator(mode="after")
    def _may_be_called(self) -> Dialogue:
        chosen = self.tool_choice
        if isinstance(chosen, Choice):
            if chosen.function.name not in [tool.function.name for tool in self.tools or ()]:
                raise refused("tool_choice", "value")
        elif chosen == "required" and not self.tools:
            raise refused("tools", "value")
        if self.top_logprobs and not self.log_probs:
            raise refused("top_logprobs", "value")
        return self

    @property
    def dialogue(self) -> list[dict[str, Any]]:
        """The messages as most chat templates read them."""
        raise NotImplementedError

    @property
    def begun(self) -> list[dict[str, Any]] | None:
        """The first messages, if the server is to store them."""
        return None

    def prompts(self, template: Template) -> list[list[dict[str, Any]]]:
        """The dialogue as the one prompt."""
        return [template.shown(self.dialogue)]

    def stored(self, template: Template) -> list[dict[str, Any]] | None:
        """The prefix as the engine takes it."""
        return None if self.begun is None else template.shown(self.begun)

    @property
    def log_probs(self) -> bool:
        """Returns whether tokens have log-probabilities."""
        raise NotImplementedError

    @property
    def effort(self) -> str | None:
        """The option `reasoning_effort` of the chat template."""
        return None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as chat templates read them."""
        return [] if self.tool_choice == "none" else [tool.document for tool in self.tools or ()]

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        tools = {"tools": self.callable} if self.callable else {}
        return effort | (self.chat_template_kwargs or {}) | tools

    def reading(self, template: Template) -> Reading:
        """The way in which answers are read. Raises ValueError for what the template cannot show."""
        if self.tools and "tools" in (self.chat_template_kwargs or {}):
            raise ValueError("tools are given twice, also in chat_template_kwargs: expected one of the two")
        if self.callable and self.begun is not None:
            raise ValueError(
                "tools are given with a prefix, and the template would write them twice: expected no prefix"
            )
        called = any("tool_calls" in message for message in [*self.dialogue, *(self.begun or ())])
        template.check(tools=bool(self.callable), calls=called)
        most = 1 if self.parallel_tool_calls is False else sys.maxsize
        return template.reading(tools=bool(self.callable), options=self.template_options, most_calls=most)

    @property
    def top(self) -> int:
        return self.top_logprobs or 0

    def grammar(self, template: Template) -> Grammar | None:
        required = self.tool_choice == "required" or isinstance(self.tool_choice, Choice)
        tools = self.callable
        if isinstance(self.tool_choice, Choice):
            tools = [tool for tool in tools if tool["function"]["name"] == self.tool_choice.function.name]
        return template.grammar(
            self.written if self.is_formed else None,
            tools=tools,
            required=required,
            several=self.parallel_tool_calls is not False and not isinstance(self.tool_choice, Choice),
            options=self.template_options,
        )
