"""Turns a request into the engine's handles: one per prompt and answer."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from kvjax.decoding.sampling import SamplingMethod
from kvjax.engine import Engine, EngineClosedError, GrammarError, Handle, QueueFullError, TooLongError

from .chat import Chat
from .dialects import Reading, Template
from .errors import ApiError, closing, ended
from .pieces import Piece, Pieces
from .responses import Responses
from .schema import Completion, StreamOptions

Wanted: TypeAlias = Completion | Chat | Responses


@dataclass(frozen=True)
class Asked:
    """A request whose answers the engine makes. Its body is not held meanwhile.

    Attributes:
        handles: prompt 0's answers, then prompt 1's.
        count: the number of answers to each prompt.
        seed: the seed of the first answer of each prompt.
        log_probs: whether tokens have log-probabilities.
        top: the number of most probable tokens that each token comes with.
        stream: None, or the options of the stream of the answers.
        repeated: fields of the request that the answer repeats.
        reading: how the answers are read.
        only_prompt: whether answers that begin with the prompt end there.
        tokenizer: that of the engine.
        id: names the answer.
        created: the time of the request in seconds since 1970.
    """

    handles: Sequence[Handle]
    count: int
    seed: int
    log_probs: bool
    top: int
    stream: StreamOptions | None
    reading: Reading
    repeated: Mapping[str, Any]
    only_prompt: bool
    tokenizer: Any = field(repr=False)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, tokens: int) -> dict[str, Any]:
        """The number of tokens of the prompts, each counted once, and of the answers."""
        first = self.handles[:: self.count]
        prompts = sum(max(one.prompt_tokens, one.echoed.size) for one in first)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": tokens,
            "total_tokens": prompts + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in first)},
        }

    def pieces(self) -> list[Pieces]:
        """The makers of each answer's pieces."""
        facts = {"log_probs": self.log_probs, "only_prompt": self.only_prompt}
        return [Pieces(self.tokenizer, one, self.reading, **facts) for one in self.handles]

    async def answers(self) -> list[Piece]:
        """All answers, each as one piece. Raises ApiError if the server ends them."""
        with ending_is_told():
            found = [await handle for handle in self.handles]
        for answer in found:
            check_finished(answer.finish)
        return [pieces.whole(answer) for pieces, answer in zip(self.pieces(), found, strict=True)]


def check_finished(finish: str | None) -> None:
    """Raises ApiError for an answer that the server has cancelled."""
    if finish == "cancelled":
        raise closing()


@contextmanager
def ending_is_told() -> Iterator[None]:
    """Turns the end of the engine, and of an answer that cannot go on, into an error for the client."""
    try:
        yield
    except FloatingPointError as error:
        raise ApiError(422, str(error), code="not_finite") from None
    except GrammarError as error:
        raise ApiError(422, str(error), code="grammar") from None
    except TooLongError as error:  # the conversation that it was to continue has left the store meanwhile
        raise _too_long(error) from None
    except EngineClosedError as error:
        raise ended(error) from None


@contextmanager
def freed(asked: Asked) -> Iterator[None]:
    """Frees the rows of a request, however it ends."""
    try:
        yield
    finally:
        _cancel(asked.handles)


async def ask(engine: Engine, request: Wanted, sampler: SamplingMethod, template: Template) -> Asked:
    """Submits all prompts of a request.

    Args:
        engine: that answers.
        request: what the client asks for.
        sampler: what draws, as far as the request does not say.
        template: what the chat template of the engine's tokenizer tells.

    Raises:
        ApiError: 400 for a request that the engine refuses, 429 if its queue is full, 503 if it is closed.
    """
    most = engine.sizes.max_new_tokens
    if request.limit is not None and request.limit > most:
        message = f"{request.limited_by}={request.limit}: expected at most {most}, the server's limit"
        raise ApiError(400, message, request.limited_by, "invalid_value")
    last = engine.params.config.vocab_size - 1
    if (token := max(request.stop_token_ids or (0,))) > last:
        message = f"stop_token_ids has the token {token}: expected ids in 0 .. {last}"
        raise ApiError(400, message, "stop_token_ids", "invalid_value")
    try:
        reading, guide = request.reading(template), request.guide(template)
        options = dict(
            max_new_tokens=most if request.limit is None else request.limit,
            sampler=request.sampler(sampler),
            eos=request.ends(engine.ends),
            stop=request.stops,
            log_probs=request.log_probs,
            prefix=request.stored(template),
            chat_template_kwargs=request.template_options,
            guide=guide,
            reuse=request.cache_prompt is not False,
            shown_tokens=reading.markers if request.skip_special_tokens is not False else template.special_tokens,
        )
    except ValueError as error:  # of the sampler, the template and the grammar
        raise _told(error, request) from None
    if guide is not None and not engine.guided:
        message = "grammars, biases, penalties and top log-probabilities: expected a server without --no-guided"
        raise ApiError(400, message, code="not_supported")
    seed, gone = secrets.randbits(48) if request.seed is None else request.seed, threading.Event()
    count = request.count
    prompts = [prompt for prompt in request.prompts(template) for _ in range(count)]
    seeds = [(seed + i % count + 2**63) % 2**64 - 2**63 for i in range(len(prompts))]  # of 64 bits
    handles: list[Handle] = []

    def submit() -> None:
        handles.extend(engine.submit_all(prompts, seeds, **options))
        if gone.is_set():  # this coroutine was cancelled, and the thread went on
            _cancel(handles)

    try:
        await run_in_threadpool(submit)
    except BaseException as error:
        gone.set()
        _cancel(handles)
        raise _told(error, request) from None
    return Asked(
        handles,
        count=count,
        seed=seed,
        log_probs=request.log_probs,
        top=request.top,
        stream=request.stream_options or StreamOptions() if request.stream else None,
        reading=reading,
        repeated=request.repeated,
        only_prompt=request.only_prompt,
        tokenizer=engine.tokenizer,
    )


def _cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.cancel()


def _told(error: BaseException, request: Wanted) -> BaseException:
    if isinstance(error, TooLongError):
        return _too_long(error, _field(error, request))
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), _formed_by(request), "invalid_value")
    if isinstance(error, ValueError):
        return ApiError(400, str(error), _field(error, request), "invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, EngineClosedError):
        return ended(error)
    return error


def _too_long(error: TooLongError, field: str | None = None) -> ApiError:
    message = f"{error}; this is the maximum context length of the server"
    return ApiError(400, message, field, "context_length_exceeded")


def _formed_by(request: Wanted) -> str:
    """The field from which the grammar of a request follows."""
    if request.is_formed:
        return request.formed_by if request.regex is None else "regex"
    return "tools"


def _field(error: ValueError, request: Wanted) -> str:
    """The field that an error of the engine is about: the one that its message begins with, or the prompt."""
    begins = re.match(r"(?:the )?(\w+)", str(error))
    return begins[1] if begins is not None and begins[1] in type(request).model_fields else request.asks_by


async def unless_gone(request: Request, asked: Asked, timeout: float) -> list[Piece]:
    """The answers of a request. The rows are free as soon as its client goes away, or the time is over.

    Raises:
        ApiError: 408 after `timeout` seconds, and 499 if the client is gone, which nobody reads.
    """
    with freed(asked):
        answers = asyncio.ensure_future(asked.answers())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answers, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return answers.result()
            if gone.done():
                raise ApiError(499, "the client has closed the connection")
            raise ApiError(408, f"the answer took more than {timeout:g} seconds", code="timeout")
        finally:
            answers.cancel()
            gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
