"""The fields of a chat."""

from __future__ import annotations

import sys
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvjax.decoding.grammars import Grammar

from .dialects import Reading, Template
from .fields import Flag, String, Top, Whole, refused
from .functions import Choice, ToolChoice, Tools
from .messages import Messages
from .schema import Common


class Chat(Common):
    """A request for `/v1/chat/completions`.

    Attributes:
        messages: the dialogue.
        max_completion_tokens: the newer name of max_tokens. Without either, an answer may have as many tokens as the
            engine allows.
        logprobs: returns the log-probability of each token.
        top_logprobs: with logprobs, returns those of so many most probable tokens too.
        chat_template_kwargs: not in OpenAI's API: options of the chat template, such as {"enable_thinking": false}.
        reasoning_effort: an option of the chat template, too.
        tools: functions that the model may call, as far as tool_choice allows it.
        tool_choice: "auto" is the default. With "none" the chat template is not shown the tools.
        parallel_tool_calls: false drops all calls of an answer but the first.
        prefix: not in OpenAI's API: the first messages of the dialogue, such as a system message with a document. The
            server reads and compresses them once for all requests that begin with them.
    """

    asks_by: ClassVar[str] = "messages"

    messages: Messages
    prefix: Annotated[Messages | None, Field(description="messages as the field messages has them")] = None
    max_completion_tokens: Whole = None
    max_tokens: Whole = None
    logprobs: Flag = None
    top_logprobs: Annotated[Top, Field(description="with logprobs, an integer from 0 to 20")] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    chat_template_kwargs: Annotated[
        Annotated[dict[str, Any], Field(max_length=64)] | None,
        Field(description="an object with at most 64 options of the chat template"),
    ] = None
    reasoning_effort: String = None
    parallel_tool_calls: Flag = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None,
        Field(description='null or ["text"]'),
    ] = None

    @model_validator(mode="after")
    def _may_be_called(self) -> Chat:
        chosen = self.tool_choice
        if isinstance(chosen, Choice):
            if chosen.function.name not in [tool.function.name for tool in self.tools or ()]:
                raise refused("tool_choice", "value")
        elif chosen == "required" and not self.tools:
            raise refused("tools", "value")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "value")
        return self

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        """The dialogue as the one prompt."""
        return [[message.document for message in self.messages]]

    @property
    def stored(self) -> list[dict[str, Any]] | None:
        """The prefix as the engine takes it."""
        return None if self.prefix is None else [message.document for message in self.prefix]

    @property
    def limited_by(self) -> str:
        """The field that the client has used."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as chat templates read them."""
        return [] if self.tool_choice == "none" else [tool.document for tool in self.tools or ()]

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        tools = {"tools": self.callable} if self.callable else {}
        return effort | (self.chat_template_kwargs or {}) | tools

    def reading(self, template: Template) -> Reading:
        """The way in which answers are read. Raises ValueError for what the template cannot show."""
        if self.tools and "tools" in (self.chat_template_kwargs or {}):
            raise ValueError("tools are given twice, also in chat_template_kwargs: expected one of the two")
        if self.callable and self.prefix is not None:
            raise ValueError(
                "tools are given with a prefix, and the template would write them twice: expected no prefix"
            )
        called = any(message.tool_calls for message in [*self.messages, *(self.prefix or ())])
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
