"""The fields of requests: those of OpenAI's API that kvjax has, and those that it refuses by name.

Fields that do not change an answer, such as `user`, are accepted. Fields that would, such as `suffix`, are accepted
with the value that changes nothing. Any other field or value is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvjax.decoding.grammars import Grammar
from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod
from kvjax.engine import Guide

from .dialects import Reading, Template
from .fields import (
    Bias,
    Flag,
    Integer,
    MinP,
    Most16,
    Object,
    Penalty,
    Seed,
    Strict,
    String,
    Subtracted,
    Temperature,
    Text,
    Top,
    TopK,
    TopP,
    refused,
)
from .formats import ResponseFormat
from .grammars import Writer

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a request and of `kvjax.Sampler`
# Values of clients for what `kvjax.Sampler` calls None.
UNLIMITED = {("top_p", 1), ("top_k", 0), ("top_k", -1), ("min_p", 0)}
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
    """The fields that all requests for answers have in common.

    Attributes:
        seed: determines the draws. Without it the server draws a seed; the answer says which.
        stop: an empty string is none.
        top_k, min_p, repetition_penalty, ignore_eos: not in OpenAI's API. See `kvjax.Sampler`.
        frequency_penalty, presence_penalty, logit_bias: see `kvjax.engine.Guide`.
        regex: not in OpenAI's API: a regular expression that the content matches as a whole.
        stop_token_ids: not in OpenAI's API: tokens that end the answer too.
        skip_special_tokens: not in OpenAI's API: false has answers name special tokens, but for end tokens.
        cache_prompt: not in OpenAI's API: false has the request continue no conversation, and no other continue it.
    """

    asks_by: ClassVar[str]  # the field of the prompt
    formed_by: ClassVar[str]  # and that of the form of the content

    model: Annotated[str, Field(description="the name of the model, a string")]
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
    frequency_penalty: Subtracted = None
    presence_penalty: Subtracted = None
    logit_bias: Bias = None
    regex: Annotated[Text | None, Field(description="a regular expression, not empty")] = None
    stop_token_ids: Annotated[
        Annotated[list[Annotated[Integer, Field(ge=0, lt=2**31)]], Field(max_length=16, fail_fast=True)] | None,
        Field(description="a list of at most 16 token ids"),
    ] = None
    skip_special_tokens: Flag = True
    cache_prompt: Flag = True
    # accepted, because they do not change an answer
    user: String = None
    metadata: Object = None
    store: Flag = None
    service_tier: String = None
    safety_identifier: String = None
    prompt_cache_key: String = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Common:
        if self.regex is not None and self.content_schema is not None:
            raise refused("regex", "value")
        return self

    @property
    def count(self) -> int:
        """The number of answers to each prompt."""
        return 1

    @property
    def content_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the content; None for text."""
        raise NotImplementedError

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields that the answer repeats."""
        return {}

    def written(self, writer: Writer) -> str:
        """The expression of the content in a grammar. The content must have a form."""
        if self.regex is not None:
            return writer.regex(self.regex)
        assert self.content_schema is not None
        return writer.json(self.content_schema)

    @property
    def is_formed(self) -> bool:
        """Returns whether the content has a form."""
        return self.regex is not None or self.content_schema is not None

    @property
    def top(self) -> int:
        """The number of tokens whose log-probabilities come with each token."""
        raise NotImplementedError

    def grammar(self, template: Template) -> Grammar | None:
        """The grammar of answers; None if they are free."""
        raise NotImplementedError

    def guide(self, template: Template) -> Guide | None:
        """The host's part in the drawing of tokens; None if it has none."""
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items() if bias}
        penalties = self.frequency_penalty or 0.0, self.presence_penalty or 0.0
        found = Guide(self.grammar(template), biases, *penalties, self.top, self.echoes)
        return None if found.changes_nothing else found

    def ends(self, usual: Sequence[int]) -> tuple[int, ...]:
        """The end tokens of an answer, given those of the engine."""
        return (*(() if self.ignore_eos or self.echoes else usual), *(self.stop_token_ids or ()))

    @property
    def echoes(self) -> bool:
        """Returns whether the answer begins with the prompt."""
        return False

    @property
    def only_prompt(self) -> bool:
        """Returns whether an answer that begins with the prompt ends there."""
        return False

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


class Choices(Common):
    """A request whose answers are choices.

    Attributes:
        n: the number of answers to each prompt. Answer i has the seed `seed` + i.
        response_format: the form of the content.
    """

    formed_by: ClassVar[str] = "response_format"

    n: Most16 = 1
    response_format: Annotated[ResponseFormat | None, Field(description="an object with a type")] = None

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def content_schema(self) -> dict[str, Any] | None:
        return None if self.response_format is None else self.response_format.schema_


class Completion(Choices):
    """A request for `/v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of either.
        logprobs: returns the log-probability of each token, and of so many most probable ones.
        echo: the answer begins with the prompt, whose tokens have log-probabilities. See `kvjax.engine.Guide`.
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
        bool | None, Field(description="false, or with logprobs, without stream, stop and prefix, true")
    ] = None
    logprobs: Annotated[
        Top,
        BeforeValidator(lambda value: None if value is False else value),  # false equals 0, and means null
        Field(description="null, or an integer from 0 to 20"),
    ] = None
    max_tokens: Annotated[
        Annotated[Integer, Field(ge=0, lt=2**31)] | None,
        Field(description="an integer of at least 1, or with echo of at least 0"),
    ] = None
    best_of: Annotated[Literal[1] | None, Field(description="null or 1: this server returns all answers")] = None
    suffix: Annotated[Literal[""] | None, Field(description="null or empty: answers continue the prompt")] = None

    @model_validator(mode="after")
    def _scores(self) -> Completion:
        if self.echo and (self.logprobs is None or self.stream or self.stops or self.prefix is not None):
            raise refused("echo", "value")
        if self.only_prompt and not self.echo:
            raise refused("max_tokens", "value")
        return self

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_prompt(self) -> bool:
        return self.max_tokens == 0

    def stored(self, template: Template) -> str | list[int] | None:
        """The prefix as the engine takes it."""
        return self.prefix

    def prompts(self, template: Template) -> list[str | list[int]]:
        """One prompt per entry."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer: OpenAI's default is 16, and without any the engine has one to drop."""
        return 16 if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def template_options(self) -> None:
        """Text has no chat template."""

    def reading(self, template: Template) -> Reading:
        """The way in which answers are read: all of their text is content."""
        return Reading()

    @property
    def top(self) -> int:
        return self.logprobs or 0

    def grammar(self, template: Template) -> Grammar | None:
        if not self.is_formed:
            return None
        writer = Writer(template.tokenizer)
        return writer.grammar(self.written(writer))
