"""The input of a response: items, which become the messages that chat templates read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .fields import Ignored, Strict
from .functions import Called

Documents = list[dict[str, Any]]


class Part(Strict):
    """A part of a content. Only text is accepted."""

    type: Annotated[
        Literal["input_text", "output_text", "reasoning_text", "text"],
        Field(description='"input_text" or "output_text": this server reads only text'),
    ]
    text: Annotated[str, Field(description="a string")]
    annotations: Ignored = None
    logprobs: Ignored = None


Content = Annotated[
    str | Annotated[list[Part], Field(max_length=4096, fail_fast=True)],
    Field(description='a string, or a list of {"type": "input_text", "text": ...}'),
]


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _assistant(documents: Documents, *, begins: bool) -> dict[str, Any]:
    """The message of the assistant that an item belongs to: the last one, unless another begins."""
    if begins or not documents or documents[-1]["role"] != "assistant":
        documents.append({"role": "assistant", "content": ""})
    return documents[-1]


class Said(Strict):
    """A message. A "developer" is what templates call "system"."""

    type: Annotated[Literal["message"] | None, Field(description='"message"')] = None
    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Field(description='"system", "developer", "user" or "assistant"'),
    ]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None

    def add_to(self, documents: Documents) -> None:
        """Adds the item to messages as chat templates read them."""
        text = _text(self.content)
        if self.role != "assistant":
            documents.append({"role": "system" if self.role == "developer" else self.role, "content": text})
            return
        last = documents[-1] if documents else {}
        said = bool(last.get("content") or last.get("tool_calls"))
        _assistant(documents, begins=said)["content"] = text


class FunctionCall(Called):
    """A call of the model."""

    type: Annotated[Literal["function_call"], Field(description='"function_call"')]
    call_id: Annotated[str, Field(description="a string, which the output of the call repeats")]
    id: Ignored = None
    status: Ignored = None

    def add_to(self, documents: Documents) -> None:
        """Adds the item to messages as chat templates read them."""
        message = _assistant(documents, begins=False)
        message["tool_calls"] = [*message.get("tool_calls", ()), self.document_of(self.call_id)]


class FunctionOutput(Strict):
    """The output of a function."""

    type: Annotated[Literal["function_call_output"], Field(description='"function_call_output"')]
    call_id: Annotated[str, Field(description="a string: that of the call")]
    output: Content
    id: Ignored = None
    status: Ignored = None

    def add_to(self, documents: Documents) -> None:
        """Adds the item to messages as chat templates read them."""
        documents.append({"role": "tool", "content": _text(self.output), "tool_call_id": self.call_id})


class Thought(Strict):
    """A thought of the model, for templates that show it."""

    type: Annotated[Literal["reasoning"], Field(description='"reasoning"')]
    content: Annotated[list[Part] | None, Field(description="null, or a list of parts with text")] = None
    id: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None
    status: Ignored = None

    def add_to(self, documents: Documents) -> None:
        """Adds the item to messages as chat templates read them."""
        if self.content:
            _assistant(documents, begins=True)["reasoning_content"] = _text(self.content)


def _kind(value: Any) -> Any:
    """The type of an item. A message may leave it out."""
    return (value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or "message"


Item = Annotated[
    Annotated[Said, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Thought, Tag("reasoning")],
    Discriminator(_kind),
]
Input = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True)],
    Field(
        description="a string, or a list of 1 to 4,096 items of the types message, function_call, "
        "function_call_output and reasoning"
    ),
]


def documents_of(instructions: str | None, given: str | list[Any]) -> Documents:
    """The messages of a request as chat templates read them.

    Args:
        instructions: the first message, of the system; None for none.
        given: the input.
    """
    documents: Documents = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*documents, {"role": "user", "content": given}]
    for item in given:
        item.add_to(documents)
    return documents
