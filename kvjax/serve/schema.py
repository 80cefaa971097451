"""The fields of requests: those of OpenAI's API that kvjax has, and those that it refuses by name.

Fields that do not change an answer, such as `user`, are accepted. Fields that would, such as `tools`, are accepted with
the value that changes nothing. Any other field or value is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kvjax.checks import shown
from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod

from .errors import ApiError

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a request and of `kvjax.Sampler`

Most16 = Annotated[int, Field(ge=1, le=16)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Whole = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Nothing = Literal[0] | None
Empty = Annotated[list[Any] | dict[str, Any], Field(max_length=0)] | None


class Strict(BaseModel):
    """Refuses unknown fields, and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(Strict):
    """What completions and chats have in common.

    Attributes:
        n: the number of answers to each prompt. Answer i has the seed `seed` + i.
        seed: determines the draws. Without it the server draws a seed; the answer says which.
        top_k, min_p, repetition_penalty, ignore_eos: not in OpenAI's API. See `kvjax.Sampler`.
    """

    model: str
    n: Most16 | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seed: Seed | None = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=16)] | None,
        Field(description="a string of at least one character, or a list of at most 16"),
    ] = None
    ignore_eos: bool = False
    # accepted, because they do not change an answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # accepted only with the value that changes nothing
    frequency_penalty: Nothing = None
    presence_penalty: Nothing = None
    logit_bias: Annotated[Empty, Field(description="null or an empty object")] = None

    def sampler(self, default: SamplingMethod) -> SamplingMethod:
        """What draws the tokens. A temperature of 0 is greedy, and what is not given is as in `default`."""
        given = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        if isinstance(default, Sampler):
            given = {name: getattr(default, name) for name in FIELDS} | given
        elif not given.keys() - {"repetition_penalty"}:
            given["temperature"] = 0
        given.setdefault("repetition_penalty", default.repetition_penalty)
        if given.get("temperature") == 0:
            return Greedy(repetition_penalty=given["repetition_penalty"])
        return Sampler(**given | {"top_p": None if given.get("top_p") == 1 else given.get("top_p")})

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class Completion(Common):
    """A request for `/v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of either.
        logprobs: 0 returns the log-probability of each token. Other tokens' are not available.
        prefix: not in OpenAI's API: text or token ids that the prompts continue. The server reads and compresses it
            once for all requests that begin with it.
    """

    prompt: Annotated[
        Text | Annotated[list[Text] | list[int] | list[list[int]], Field(min_length=1)],
        Field(description="a string, token ids, or a list of either"),
    ]
    logprobs: Nothing = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    prefix: Annotated[
        Text | Annotated[list[int], Field(min_length=1)] | None, Field(description="a string or token ids")
    ] = None

    @property
    def stored(self) -> str | list[int] | None:
        """The prefix as the engine takes it."""
        return self.prefix

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt per entry."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer: OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def template_options(self) -> None:
        """Text has no chat template."""


class Part(Strict):
    """A part of a message. Only text is accepted."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A message of a chat. A "developer" is what templates call "system"."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: None = None

    @property
    def document(self) -> dict[str, str]:
        """The message as chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Form(Strict):
    """The form of an answer. Only text is available."""

    type: Literal["text"]


Messages = Annotated[
    list[Message],
    Field(
        min_length=1,
        description="a list of objects with role (system, developer, user, assistant) and content, a string "
        'or a list of {"type": "text", "text": ...}',
    ),
]


class Chat(Common):
    """A request for `/v1/chat/completions`.

    Attributes:
        messages: the dialogue.
        max_completion_tokens: the newer name of max_tokens. Without either, an answer may have as many tokens as the
            engine allows.
        logprobs: returns the log-probability of each token.
        chat_template_kwargs: not in OpenAI's API: options of the chat template, such as {"enable_thinking": false}.
        reasoning_effort: an option of the chat template, too.
        tools: accepted with tool_choice "none", with which no tool is called.
        prefix: not in OpenAI's API: the first messages of the dialogue, such as a system message with a document. The
            server reads and compresses them once for all requests that begin with them.
    """

    messages: Messages
    prefix: Messages | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Nothing = None
    response_format: Form | None = None
    tool_choice: Annotated[Literal["none", "auto"] | None, Field(description='"none", or "auto" without tools')] = None
    tools: Annotated[list[Any] | None, Field(description='null, an empty list, or tools with tool_choice "none"')] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="an object with the options of the chat template")
    ] = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tools")
    @classmethod
    def _never_called(cls, tools: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
        if tools and info.data.get("tool_choice") != "none":
            raise ValueError("the model calls no tools")
        return tools

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """The dialogue as the one prompt."""
        return [[message.document for message in self.messages]]

    @property
    def stored(self) -> list[dict[str, str]] | None:
        """The prefix as the engine takes it."""
        return None if self.prefix is None else [message.document for message in self.prefix]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


Kind = TypeVar("Kind", bound=Common)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Reads a request. Raises ApiError, which names the field, the value and what is accepted."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [str(part) for part in first["loc"]]
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json") from None
        if not names:
            raise ApiError(400, "the body is no JSON object: expected one with the fields of the request") from None
        param = names[0]
        if first["type"] == "missing":
            raise ApiError(400, f"{'.'.join(names)} is missing", param) from None
        if first["type"] == "extra_forbidden":
            message = f"{'.'.join(names)}: unknown or not supported; expected one of {', '.join(kind.model_fields)}"
            raise ApiError(400, message, param) from None
        expected = kind.model_fields[param].description
        if expected is not None:
            raise ApiError(400, f"{'.'.join(names[:2])}={shown(first['input'])}: expected {expected}", param) from None
        raise ApiError(400, f"{'.'.join(names)}={shown(first['input'])}: {first['msg']}", param) from None
