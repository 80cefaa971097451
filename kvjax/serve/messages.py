"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .fields import Ignored, Strict, refused

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
    `refusal` and `tool_calls`, are accepted without a value, so that a client can send back what it received.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Field(description='"system", "developer", "user" or "assistant": this server calls no tools'),
    ]
    content: Annotated[
        str | Annotated[list[Part], Field(max_length=4096, fail_fast=True)] | None, Field(description=CONTENT)
    ] = None
    name: Ignored = None
    cache_control: Ignored = None
    annotations: Ignored = None
    id: Ignored = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("content", "value")
        return self

    @property
    def document(self) -> dict[str, str]:
        """The message as chat templates read it. An answer that is null is empty."""
        given = self.content or ""
        content = given if isinstance(given, str) else "".join(part.text for part in given)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[
    list[Message],
    Field(
        min_length=1,
        max_length=4096,
        fail_fast=True,
        description="a list of 1 to 4,096 objects with role (system, developer, user or assistant) and content, "
        f"{CONTENT}",
    ),
]
