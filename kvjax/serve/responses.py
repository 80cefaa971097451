"""The fields of a response, in the plain form: the server stores no response, and runs no tool."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from .dialogue import Dialogue
from .fields import Ignored, Strict, String, Whole
from .formats import ResponseFormat
from .functions import MOST_TOOLS, Choice, Tool
from .items import Input, documents_of

LOG_PROBS = "message.output_text.logprobs"
REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "parallel_tool_calls", "tool_choice", "tools")


def _nested(inner: str, kind: str) -> BeforeValidator:
    """Puts the fields of an object of this type into one of it, as chats have them. The form of chats is refused."""

    def nest(value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != kind:
            return value
        if inner in value:
            raise ValueError
        return {"type": kind, inner: {name: field for name, field in value.items() if name != "type"}}

    return BeforeValidator(nest)


class Text(Strict):
    """The form of the content."""

    format: Annotated[
        Annotated[ResponseFormat, _nested("json_schema", "json_schema")] | None,
        Field(description="an object with a type, and for json_schema with name and schema"),
    ] = None
    verbosity: Annotated[Literal["medium"] | None, Field(description='null or "medium"')] = None


class Reasoning(Strict):
    """Options of reasoning. Its text is always returned.

    Attributes:
        effort: the option `reasoning_effort` of the chat template.
    """

    effort: String = None
    summary: String = None


class Responses(Dialogue):
    """A request for `/v1/responses`.

    Attributes:
        input: the dialogue.
        instructions: the first message of the system.
        max_output_tokens: without it, an answer may have as many tokens as the engine allows.
        include: "message.output_text.logprobs" returns the log-probability of each token.
        text, reasoning: the form of the content, and options of the chat template.
        previous_response_id: refused, because the server stores no responses.
    """

    asks_by: ClassVar[str] = "input"
    formed_by: ClassVar[str] = "text"
    limited_by: ClassVar[str] = "max_output_tokens"

    input: Input
    instructions: String = None
    max_output_tokens: Whole = None
    text: Annotated[Text | None, Field(description='an object with the field "format"')] = None
    reasoning: Annotated[Reasoning | None, Field(description='an object with the field "effort"')] = None
    tools: Annotated[
        Annotated[list[Annotated[Tool, _nested("function", "function")]], Field(max_length=MOST_TOOLS, fail_fast=True)]
        | None,
        Field(
            description=f'null, or at most {MOST_TOOLS} tools, {{"type": "function", "name": ..., "parameters": ...}}'
        ),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Annotated[Choice, _nested("function", "function")] | None,
        Field(description='"none", "auto", "required" or {"type": "function", "name": ...}'),
    ] = None
    include: Annotated[
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=2)]
        | None,
        Field(description=f'null, or ["{LOG_PROBS}"]'),
    ] = None
    previous_response_id: Annotated[
        None, Field(description="null: this server stores no responses; send the earlier items in input")
    ] = None
    background: Annotated[Literal[False] | None, Field(description="null or false")] = None
    truncation: Annotated[
        Literal["disabled"] | None, Field(description='null or "disabled": this server drops no items')
    ] = None
    max_tool_calls: Ignored = None

    @property
    def dialogue(self) -> list[dict[str, Any]]:
        return documents_of(self.instructions, self.input)

    @property
    def content_schema(self) -> dict[str, Any] | None:
        return None if self.text is None or self.text.format is None else self.text.format.schema_

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields that the response repeats."""
        tools = [{"type": "function", "strict": False, **tool.document["function"]} for tool in self.tools or ()]
        chosen = self.tool_choice
        named = {"type": "function", "name": chosen.function.name} if isinstance(chosen, Choice) else chosen
        given = {name: getattr(self, name) for name in REPEATED}
        calls = self.parallel_tool_calls is not False
        return given | {"tools": tools, "tool_choice": named or "auto", "parallel_tool_calls": calls}
