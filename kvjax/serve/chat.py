"""The fields of a chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .dialogue import Dialogue
from .fields import Flag, String, Whole
from .messages import Messages
from .schema import Choices


class Chat(Dialogue, Choices):
    """A request for `/v1/chat/completions`.

    Attributes:
        messages: the dialogue.
        max_completion_tokens: the newer name of max_tokens. Without either, an answer may have as many tokens as the
            engine allows.
        logprobs: returns the log-probability of each token.
        reasoning_effort: an option of the chat template.
        prefix: not in OpenAI's API: the first messages of the dialogue, such as a system message with a document. The
            server reads and compresses them once for all requests that begin with them.
    """

    asks_by: ClassVar[str] = "messages"

    messages: Messages
    prefix: Annotated[Messages | None, Field(description="messages as the field messages has them")] = None
    max_completion_tokens: Whole = None
    max_tokens: Whole = None
    logprobs: Flag = None
    reasoning_effort: String = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None,
        Field(description='null or ["text"]'),
    ] = None

    @property
    def dialogue(self) -> list[dict[str, Any]]:
        return [message.document for message in self.messages]

    @property
    def begun(self) -> list[dict[str, Any]] | None:
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
    def effort(self) -> str | None:
        return self.reasoning_effort
