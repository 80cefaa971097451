"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .fields import Ignored, Strict, String, refused
from .functions import MOST_TOOLS, ToolCall

CONTENT = 'a string, or a list of {"type": "text", "text": ...}'


class Part(Strict):
    """A part of a message. Only text is accepted.

    Attributes:
        cache_control: accepted, because it does not change an answer.
    """

    type: Annotated[Literal["text"], Field(description='"text": this server reads only text')]
    text: Annotated[str, Field(description="a string")]
    cache_control: Ignored = None


class Message(Strict):
    """A message of a chat. A "developer" is what templates call "system".

    Fields that do not change what the template writes are accepted and ignored. All other fields of an answer, such as
    `refusal`, are accepted without a value, so that a client can send back what it received.

    Attributes:
        tool_calls: the calls of an assistant.
        tool_call_id: the call that a message with the role "tool" answers.
        reasoning_content, reasoning: what the assistant thought, for templates that show it.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Field(description='"system", "developer", "user", "assistant" or "tool"'),
    ]
    content: Annotated[
        str | Annotated[list[Part], Field(max_length=4096, fail_fast=True)] | None, Field(description=CONTENT)
    ] = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None,
        Field(description="null, or in a message of the assistant a list of calls"),
    ] = None
    tool_call_id: Annotated[
        str | None, Field(description='in a message with the role "tool", the id of the call that it answers')
    ] = None
    name: String = None
    cache_control: Ignored = None
    annotations: Ignored = None
    id: Ignored = None
    reasoning: String = None
    reasoning_content: String = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("content", "value")
        if self.tool_calls and self.role != "assistant":
            raise refused("tool_calls", "value")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise refused("tool_call_id", "value")
        return self

    @property
    def document(self) -> dict[str, Any]:
        """The message as chat templates read it. An answer that is null is empty."""
        given = self.content or ""
        content = given if isinstance(given, str) else "".join(part.text for part in given)
        document: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            document["tool_calls"] = [call.document for call in self.tool_calls]
        if self.role == "tool":
            document |= {"tool_call_id": self.tool_call_id} | ({"name": self.name} if self.name else {})
        if reasoning := self.reasoning_content or self.reasoning:
            document["reasoning_content"] = reasoning
        return document


Messages = Annotated[
    list[Message],
    Field(
        min_length=1,
        max_length=4096,
        fail_fast=True,
        description="a list of 1 to 4,096 objects with role (system, developer, user, assistant or tool) and content, "
        f"{CONTENT}",
    ),
]
