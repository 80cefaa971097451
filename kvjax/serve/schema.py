"""The fields of requests: those of OpenAI's API that kvjax has, and those that it refuses by name.

Fields that do not change an answer, such as `user`, are accepted. Fields that would, such as `tools`, are accepted with
the value that changes nothing. Any other field or value is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod

from .fields import (
    Flag,
    MinP,
    Most16,
    NoBias,
    Object,
    Penalty,
    Seed,
    Strict,
    String,
    Temperature,
    Text,
    TopK,
    TopP,
    Whole,
    Zero,
)
from .messages import Messages

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a request and of `kvjax.Sampler`
UNLIMITED = {("top_p", 1), ("top_k", 0), ("top_k", -1)}  # values of clients for what `kvjax.Sampler` calls None
PROMPTS = 2048  # of one request

Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class StreamOptions(Strict):
    """Options of a stream.

    Attributes:
        include_usage: sends the number of tokens after the last piece.
        continuous_usage_stats: not in OpenAI's API: sends it with each piece.
    """

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class Common(Strict):
    """The fields that completions and chats have in common.

    Attributes:
        n: the number of answers to each prompt. Answer i has the seed `seed` + i.
        seed: determines the draws. Without it the server draws a seed; the answer says which.
        stop: an empty string is none.
        top_k, min_p, repetition_penalty, ignore_eos: not in OpenAI's API. See `kvjax.Sampler`.
    """

    model: Annotated[str, Field(description="the name of the model, a string")]
    n: Most16 = 1
    stream: Flag = False
    stream_options: Annotated[StreamOptions | None, Field(description="an object")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: Penalty = None
    seed: Seed = None
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=16, fail_fast=True)] | None,
        Field(description="a string, or a list of at most 16"),
    ] = None
    ignore_eos: Flag = False
    # accepted, because they do not change an answer
    user: String = None
    metadata: Object = None
    store: Flag = None
    service_tier: String = None
    safety_identifier: String = None
    prompt_cache_key: String = None
    cache_prompt: Flag = None
    # accepted only with the value that changes nothing
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: NoBias = None
    skip_special_tokens: Annotated[
        Literal[True] | None, Field(description="null or true: answers have no special tokens")
    ] = None

    def sampler(self, default: SamplingMethod) -> SamplingMethod:
        """Returns what draws the tokens. A temperature of 0 is greedy, and what is not given is as in `default`."""
        given = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        given = {name: None if (name, value) in UNLIMITED else value for name, value in given.items()}
        if isinstance(default, Sampler):
            given = {name: getattr(default, name) for name in FIELDS} | given
        elif all(value is None for name, value in given.items() if name != "repetition_penalty"):
            given["temperature"] = 0
        given.setdefault("repetition_penalty", default.repetition_penalty)
        if given.get("temperature") == 0:
            return Greedy(repetition_penalty=given["repetition_penalty"])
        return Sampler(**given)

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if stop]


class Completion(Common):
    """A request for `/v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of either.
        logprobs: 0 returns the log-probability of each token. Other tokens' are not available.
        prefix: not in OpenAI's API: text or token ids that the prompts continue. The server reads and compresses it
            once for all requests that begin with it.
    """

    asks_by: ClassVar[str] = "prompt"
    limited_by: ClassVar[str] = "max_tokens"

    prompt: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=PROMPTS, fail_fast=True)],
        Field(description=f"a string, token ids, or a list of 1 to {PROMPTS:,} of either, none of them empty"),
    ]
    prefix: Annotated[Text | Ids | None, Field(description="a string or token ids, not empty")] = None
    echo: Annotated[
        Literal[False] | None,
        Field(description="null or false: this server does not score prompts; kvjax eval and lm-eval's model kvjax do"),
    ] = None
    logprobs: Annotated[
        Literal[0] | None,
        BeforeValidator(lambda value: None if value is False else value),  # false equals 0, and means null
        Field(description="null or 0: this server has the log-probabilities of the answer's own tokens alone"),
    ] = None
    max_tokens: Whole = None
    best_of: Annotated[Literal[1] | None, Field(description="null or 1: this server returns all answers")] = None
    suffix: Annotated[Literal[""] | None, Field(description="null or empty: answers continue the prompt")] = None

    @property
    def stored(self) -> str | list[int] | None:
        """The prefix as the engine takes it."""
        return self.prefix

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt per entry."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

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


class Form(Strict):
    """The form of an answer. Only text is available."""

    type: Annotated[Literal["text"], Field(description='"text": this server has no grammars')]


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

    asks_by: ClassVar[str] = "messages"

    messages: Messages
    prefix: Annotated[Messages | None, Field(description="messages as the field messages has them")] = None
    max_completion_tokens: Whole = None
    max_tokens: Whole = None
    logprobs: Flag = None
    top_logprobs: Zero = None
    response_format: Annotated[Form | None, Field(description='null or {"type": "text"}')] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, Field(description='"none", or "auto" without tools')] = None
    tools: Annotated[
        list[Any] | None, Field(description='null, an empty list, or at most 128 tools with tool_choice "none"')
    ] = None
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

    @field_validator("tools")
    @classmethod
    def _never_called(cls, tools: list[Any] | None, info: ValidationInfo) -> None:
        if tools and (info.data.get("tool_choice") != "none" or len(tools) > 128):
            raise ValueError("the model calls no tools")
        return None

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """The dialogue as the one prompt."""
        return [[message.document for message in self.messages]]

    @property
    def stored(self) -> list[dict[str, str]] | None:
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
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})
