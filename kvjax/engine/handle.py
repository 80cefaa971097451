"""A request's answer while it comes: the loop writes it, and any thread or coroutine reads it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float, Int

from kvjax.checks import shown

Top = tuple[tuple[int, float], ...]  # ids and log-probabilities
Finish = Literal["end", "stop", "length", "cancelled"]


class Token(NamedTuple):
    """One token of an answer.

    Attributes:
        id: the token's id.
        text: the text that is certain after it; None without a tokenizer. Text that may begin an incomplete character
            or a stop string is held back until that is decided.
        log_prob: its natural log-probability under the unmodified model; None unless asked for.
        top: the most probable tokens in its place with their log-probabilities, as many as the guide asks for.
    """

    id: int
    text: str | None
    log_prob: float | None
    top: Top = ()


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        tokens: int32 ids. An end token, and the tokens of a stop string, belong to them.
        text: without special tokens and without the stop string; None without a tokenizer.
        log_probs: float32 log-probability of each token under the unmodified model; None unless asked for.
        finish: why it ended:

            | finish | the answer ended |
            |---|---|
            | "end" | with an end token, or because its grammar is complete |
            | "stop" | with a stop string |
            | "length" | with max_new_tokens |
            | "cancelled" | because the request was cancelled, or the engine was closed without waiting |
        prompt_tokens: the number of tokens of the prompt.
        top: `Token.top` of each token.
        cached_tokens: the number of tokens of the prompt that a stored cache had seen: of a conversation that the
            request continues, or of its prefix.
    """

    tokens: Int[np.ndarray, "T"]
    text: str | None
    log_probs: Float[np.ndarray, "T"] | None
    finish: Finish
    prompt_tokens: int
    top: tuple[Top, ...] = ()
    cached_tokens: int = 0


class Feed:
    """The tokens of one request, in the order in which they come. The loop alone writes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self.cached_tokens = 0
        self.listeners: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def add(self, tokens: Sequence[Token], finish: Finish | None = None) -> None:
        """Adds tokens, which are the last ones if there is a reason to finish."""
        with self.changed:
            self.tokens.extend(tokens)
            self.finish = finish
            self._tell()

    def end(self, finish: Finish) -> None:
        """Ends the answer, unless it has ended."""
        with self.changed:
            if not self.ended:
                self.add((), finish)

    def fail(self, error: BaseException) -> None:
        """Ends the answer with an error, unless it has ended."""
        with self.changed:
            if not self.ended:
                self.error = error
                self._tell()

    def _tell(self) -> None:
        self.changed.notify_all()
        for listener in self.listeners:
            listener()


class Handle:
    """A request that an engine has accepted. All methods may be called from any thread, and any number of times.

    `for token in handle.tokens()` and `handle.result()` wait in a thread; `async for token in handle` and
    `await handle` wait in a coroutine.

    Attributes:
        prompt_tokens: the number of tokens before the answer.
        echoed: int32 tokens of the prompt if `Guide.echo` has the answer begin with them, but for the first; else none.
        shown: ids of the special tokens that the text names.
    """

    def __init__(
        self,
        feed: Feed,
        prompt_tokens: int,
        *,
        text: bool,
        log_probs: bool,
        shown: frozenset[int],
        echoed: Int[np.ndarray, "N"],
        cancel: Callable[[], None],
    ) -> None:
        self._feed = feed
        self._text, self._log_probs = text, log_probs
        self._cancel = cancel
        self.prompt_tokens, self.shown, self.echoed = prompt_tokens, shown, echoed

    @property
    def cached_tokens(self) -> int:
        """Returns `Answer.cached_tokens`; 0 until the prompt has been read."""
        return self._feed.cached_tokens

    @property
    def done(self) -> bool:
        """Returns whether the answer has ended."""
        return self._feed.ended

    def cancel(self) -> None:
        """Ends the answer after the tokens so far. Its row is free before the next program. It does not wait."""
        self._cancel()

    def tokens(self) -> Iterator[Token]:
        """Yields the tokens from the first on, as they come, and ends with the answer.

        Raises:
            EngineClosedError: the engine's loop failed; the cause is its error.
            FloatingPointError: logits are NaN or infinite. The message names the position.
        """
        feed, seen = self._feed, 0
        while True:
            with feed.changed:
                while len(feed.tokens) == seen and not feed.ended:
                    feed.changed.wait()
            while seen < len(feed.tokens):
                yield feed.tokens[seen]
                seen += 1
            if feed.ended and seen == len(feed.tokens):
                break
        self._check()

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the end of the answer.

        Args:
            timeout: the most seconds to wait; None for no limit.

        Raises:
            ValueError: for a `timeout` that is no number.
            TimeoutError: the answer has not ended in that time. It goes on.
            EngineClosedError: the engine's loop failed; the cause is its error.
            FloatingPointError: logits are NaN or infinite. The message names the position.
        """
        if timeout is not None and (not isinstance(timeout, Real) or timeout != timeout):
            raise ValueError(f"timeout={shown(timeout)}: expected a number of seconds, or None")
        most = None if timeout is None else float(min(max(timeout, 0), threading.TIMEOUT_MAX / 2))
        with self._feed.changed:
            if not self._feed.changed.wait_for(lambda: self._feed.ended, most):
                raise TimeoutError(f"the answer has not ended within {most:g} seconds")
        return self._answer()

    async def __aiter__(self) -> AsyncIterator[Token]:
        feed, seen = self._feed, 0
        with _Alarm(feed) as alarm:
            while True:
                ended = feed.ended  # before the tokens are counted, so that none is missed
                while seen < len(feed.tokens):
                    yield feed.tokens[seen]
                    seen += 1
                if ended:
                    break
                await alarm.wait()
        self._check()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._finished().__await__()

    async def _finished(self) -> Answer:
        with _Alarm(self._feed) as alarm:
            while not self._feed.ended:
                await alarm.wait()
        return self._answer()

    def _check(self) -> None:
        if self._feed.error is not None:
            raise self._feed.error

    def _answer(self) -> Answer:
        self._check()
        tokens, finish = self._feed.tokens, self._feed.finish
        assert finish is not None
        return Answer(
            tokens=np.array([token.id for token in tokens], np.int32),
            text="".join(token.text or "" for token in tokens) if self._text else None,
            log_probs=np.array([token.log_prob for token in tokens], np.float32) if self._log_probs else None,
            finish=finish,
            prompt_tokens=self.prompt_tokens,
            top=tuple(token.top for token in tokens),
            cached_tokens=self.cached_tokens,
        )


class Bell:
    """Wakes coroutines of one event loop from other threads: those that are due by the time that the loop looks.

    A call from thread to thread takes longer than a token's delivery, and the rows of a step ring at once.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._called = False

    @classmethod
    def here(cls) -> Bell:
        """The one of the running loop."""
        return cls._of.setdefault(asyncio.get_running_loop(), cls())

    def ring(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Sets an event of the loop. Any thread may call it."""
        self._due.append(event)
        if not self._called:
            self._called = True
            loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._called = False  # first, so that an event that comes too late for the rest calls again
        while self._due:
            self._due.popleft().set()


class _Alarm:
    """Wakes one coroutine whenever a feed changes."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._loop, self._bell = asyncio.get_running_loop(), Bell.here()
        self._event = asyncio.Event()

    def __enter__(self) -> _Alarm:
        with self._feed.changed:
            self._feed.listeners.append(self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        with self._feed.changed:
            self._feed.listeners.remove(self._ring)

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the coroutine's loop has been closed meanwhile
            self._bell.ring(self._loop, self._event)

    async def wait(self) -> None:
        """Waits until the feed has changed since the last call."""
        if not self._feed.ended:
            await self._event.wait()
        self._event.clear()
