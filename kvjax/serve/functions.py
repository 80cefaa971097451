"""Tools of a request, and calls of them in messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .fields import Flag, Ignored, Strict, String
from .writing import parsed

MOST_TOOLS = 128

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-zA-Z0-9_.-]{1,64}$",
        description="a name of at most 64 letters, digits, dots, dashes and underscores",
    ),
]


class Function(Strict):
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments; None if it has none.
        strict: accepted: calls that a request requires follow the schema in any case, and others need not.
    """

    name: Name
    description: String = None
    parameters: Annotated[dict[str, Any] | None, Field(description="a JSON schema, an object")] = None
    strict: Flag = None


class Tool(Strict):
    """A tool of a request."""

    type: Annotated[Literal["function"], Field(description='"function"')]
    function: Annotated[Function, Field(description="an object with name, description and parameters")]

    @property
    def document(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "function", "function": function | {"parameters": parameters}}


class Chosen(Strict):
    """The name of a function."""

    name: Name


class Choice(Strict):
    """The function that the model must call."""

    type: Annotated[Literal["function"], Field(description='"function"')]
    function: Annotated[Chosen, Field(description="an object with the name of a function")]


class Called(Strict):
    """A function and the arguments of a call, as text: a JSON object, or what a model has written in its place.

    Attributes:
        name: any, because a model may write names that no tool has.
    """

    name: Annotated[str, Field(description="a string")]
    arguments: Annotated[str, Field(description="a string, which should be a JSON object")]

    def document_of(self, call_id: str) -> dict[str, Any]:
        """The call as chat templates read it: its arguments are an object, or the text if that is none."""
        found = parsed(self.arguments)
        arguments = found if isinstance(found, dict) else self.arguments
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolCall(Strict):
    """A call in a message of the model."""

    id: Annotated[str, Field(description="a string, which the answer to the call repeats as tool_call_id")]
    type: Annotated[Literal["function"], Field(description='"function"')] = "function"
    function: Annotated[Called, Field(description="an object with name and arguments")]
    index: Ignored = None

    @property
    def document(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        return self.function.document_of(self.id)


Tools = Annotated[
    Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None,
    Field(description=f"null, or at most {MOST_TOOLS} tools of the type function"),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Choice | None,
    Field(description='"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]
