"""Rows that are refilled: many requests, whose prompts are read in batches, are answered in the rows of one batch.

    batches = (ReadBatch.of(params, prompts, names, max_new_tokens=512, tokenizer=tokenizer) for prompts, names in ...)
    for ended in Refill(params).run(batches):
        ended.name, ended.tokens

Prompts are read as `kvjax.generate` reads them, and a row takes the next request as soon as its answer has ended. One
program runs the steps until an answer ends, so the host takes part once per answer and not once per token. While the
device works on them, the caller gets the answers that ended before, and the next batch is read if no request waits, so
that at most one batch waits. No step begins with a free row while there are batches. Nothing here has a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from kvjax.cache import Layers
from kvjax.checks import LARGEST
from kvjax.decoding.loop import NOT_FINITE, Decoding, not_finite, take
from kvjax.decoding.row_text import RowText, stop_strings
from kvjax.decoding.sampling import SamplingMethod
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.request.ends import EndTokens
from kvjax.request.prompts import Prompt
from kvjax.request.request import AnswerOptions, Request, Seed, read_request
from kvjax.runtime.clock import Clock, clock_of
from kvjax.runtime.modes import own_modes

from .resident import Resident, advance_until, answers, place, repeated, with_slots

STOP_STEPS = 8  # between two looks for stop strings, which only the host finds


@dataclass(eq=False)
class Ended:
    """A request, and its answer once that has ended.

    Attributes:
        name: what the caller calls it.
        tokens: the ids of the answer. An end token, and the tokens of a stop string, belong to them.
        text: the answer before its stop string, without special tokens; empty if there are no stop strings.
        decoder: makes the text of the tokens; None if there are no stop strings.
        prompt_tokens: the number of tokens before the answer.
    """

    name: Any
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    decoder: RowText | None = None
    prompt_tokens: int = 0

    def take(self, tokens: Sequence[int], active: bool) -> bool:
        """Adds the next tokens, and returns whether the answer goes on.

        Args:
            active: whether it goes on after the last one, as the device sees it.
        """
        for i, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if self.decoder is not None:
                self.text += self.decoder.add(token, last=i == len(tokens) and not active)
                if self.decoder.stopped:
                    return False
        return active


@dataclass(frozen=True)
class ReadBatch:
    """Requests whose prompts have been read together.

    Attributes:
        requests: one for each of the first rows; further rows only fill the batch.
        rows: their caches, and the first token of each answer.
    """

    requests: Sequence[Ended]
    rows: Resident

    @classmethod
    @own_modes()
    def of(
        cls,
        params: Decoder,
        prompt: Prompt | None,
        names: Sequence[Any],
        *,
        max_new_tokens: int,
        policy: Policy | str | None = None,
        sampler: SamplingMethod | None = None,
        seed: Seed = 0,
        eos: EndTokens = None,
        stop: str | Sequence[str] = (),
        tokenizer: Any = None,
        cache: KVCache | None = None,
        chunk: int | None = None,
        clock: Clock | None = None,
    ) -> ReadBatch:
        """Reads a batch of prompts. The answers will be those of `kvjax.stream` with the same arguments.

        Args:
            names: of the requests in the first rows.
            clock: adds up the seconds of the reading under "prefill", and those of compiling under "compile".

        Raises:
            ValueError: for any argument that is not accepted, before anything is compiled.
        """
        stops, clock = stop_strings(stop, tokenizer), clock_of(clock)
        answer = AnswerOptions(max_new_tokens, sampler, seed, eos)
        request = Request.of(
            params, prompt, policy=policy, tokenizer=tokenizer, cache=cache, chunk=chunk, answer=answer
        )
        seen = (fetch(request.cache.length) + request.batch.lengths).tolist()
        logits, filled = clock.run("prefill", read_request, params, request)
        first = take(Decoding.begin(request.sampling, filled, size=request.limit, log_probs=False), logits)
        limits = filled.put_rows(np.full(len(request.batch.lengths), request.limit, np.int32))
        requests = [
            Ended(name, decoder=RowText(tokenizer, stops) if stops else None, prompt_tokens=n)
            for name, n in zip(names, seen, strict=False)
        ]
        return cls(requests, Resident(first, jnp.asarray(limits)).within_limits())

    @property
    def nbytes(self) -> int:
        """The bytes of the cache, which answers do not change."""
        return self.rows.decoding.cache.nbytes


class Refill:
    """Rows of one model.

    Attributes:
        rows: how many there are at least. A batch with fewer rows has further ones beside it, for the batches after it.
        clock: adds up the seconds of answering under "decode" and "compile", without those of reading, during which
            rows take steps too.
        steps: the number of decode steps of all rows.
    """

    def __init__(self, params: Decoder, rows: int = 1) -> None:
        self.rows = rows
        self.clock = Clock()
        self.steps = 0
        self._leaves, self._tree = jax.tree.flatten(params)
        self._resident: Resident | None = None
        self._rows: list[Ended | None] = []  # of each row; None where it is free
        self._waiting: deque[tuple[ReadBatch, int]] = deque()  # requests of one batch, and their rows in it
        self._compiled: set[Any] = set()

    def run(self, batches: Iterator[ReadBatch]) -> Iterator[Ended]:
        """Yields requests as their answers end.

        Args:
            batches: the requests. A batch is asked for when no request waits. Its layers and those of the rows get as
                many slots as the larger of both. If a row of its caches still has another shape than the rows, it waits
                until all of them are free.
        """
        more, ended = True, list[Ended]()
        while more or ended or self._waiting or any(self._rows):
            self._admit()
            while more and not self._waiting and None in self._rows:
                more = self._read(batches, ended)
                self._admit()
            steps = self._start()
            yield from ended
            ended = []
            if more and not self._waiting:
                more = self._read(batches, ended)
            if steps is not None:
                ended += self._finish(*steps)

    def _read(self, batches: Iterator[ReadBatch], ended: list[Ended]) -> bool:
        """Lets the requests of the next batch wait, and adds those that end with their first token to `ended`.

        Returns:
            Whether there was a batch.
        """
        batch = next(batches, None)
        if batch is not None:
            ended += self._begin(batch)
        return batch is not None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work on the device, in kvjax's modes. Its seconds count."""
        started, compiled = time.perf_counter(), self.clock.seconds["compile"]
        with own_modes():
            yield
        compiled = self.clock.seconds["compile"] - compiled
        self.clock.seconds["decode"] += time.perf_counter() - started - compiled

    def _run(self, program: Any, *args: Any, **static: Any) -> Any:
        """Starts a program. The first time it is compiled for arguments of these shapes, which counts apart."""
        key = program, jax.tree.structure(args), tuple(np.shape(x) for x in jax.tree.leaves(args))
        if key not in self._compiled:
            started = time.perf_counter()
            program.lower(*args, **static).compile()
            self.clock.seconds["compile"] += time.perf_counter() - started
            self._compiled.add(key)
        return program(*args, **static)

    def _begin(self, batch: ReadBatch) -> list[Ended]:
        """Lets the requests of a batch wait for rows. Returns those whose first token is their last one."""
        with self._working():
            ended = _delivered(batch.requests, self._run(answers, batch.rows))
            if self._resident is not None and any(self._rows):
                self._resident, rows = _alike(self._resident, batch.rows)
                batch = ReadBatch(batch.requests, rows)
        self._waiting += [(batch, i) for i, request in enumerate(batch.requests) if request not in ended]
        return ended

    def _admit(self) -> None:
        """Gives free rows to requests that wait."""
        if not self._waiting:
            return
        batch = self._waiting[0][0]
        if not any(self._rows):
            size = batch.rows.limits.size
            times = max(self.rows // size, 1)
            self._rows = [None] * (size * times)
            if times == 1:  # the batch itself becomes the rows
                self._resident = batch.rows
                while self._waiting:
                    _, i = self._waiting.popleft()
                    self._rows[i] = batch.requests[i]
                return
            with self._working():
                self._resident = self._run(repeated, batch.rows, times=times)
        assert self._resident is not None
        if _shapes_of_a_row(self._resident) != _shapes_of_a_row(batch.rows):
            return
        with self._working():
            while self._waiting and None in self._rows:
                _, i = self._waiting.popleft()
                row = self._rows.index(None)
                self._resident = self._run(place, self._resident, batch.rows, np.int32(i), np.int32(row))
                self._rows[row] = batch.requests[i]

    def _start(self) -> tuple[Array, Array] | None:
        """Starts the steps of all rows until an answer ends, if there are rows. Returns what `_finish` takes."""
        if not any(self._rows):
            return None
        wanted = np.array([request is not None for request in self._rows])
        stops = any(request is not None and request.decoder is not None for request in self._rows)
        most = np.int32(STOP_STEPS if stops else LARGEST)
        with self._working():
            self._resident, found, steps = self._run(
                advance_until, self._leaves, self._resident, wanted, most, tree=self._tree
            )
        return found, steps

    def _finish(self, found: Int32[Array, "B 2+T"], steps: Int[Array, ""]) -> list[Ended]:
        """Waits for steps. Returns the requests whose answers have ended."""
        with self._working():
            ended = _delivered(self._rows, found)
            self.steps += int(steps)
        self._rows = [None if request in ended else request for request in self._rows]
        return ended


def _alike(*rows: Resident) -> tuple[Resident, ...]:
    """The same rows, whose layers have as many slots as the most of all have. Heads with slots of their own stay."""
    entries = [one.decoding.cache.entries for one in rows]
    if not all(isinstance(one, Layers) for one in entries):
        return rows
    most = tuple(map(max, *(one.bounds for one in entries)))
    return tuple(with_slots(one, slots=most) for one in rows)


def _shapes_of_a_row(rows: Resident) -> Resident:
    """The shapes of one row, by which rows of one batch can be placed in another."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


def _delivered(requests: Sequence[Ended | None], found: Int32[Array, "B 2+T"]) -> list[Ended]:
    """Gives requests their new tokens. Returns those whose answers have ended."""
    ended = []
    for row, (request, (active, length, *tokens)) in enumerate(zip(requests, fetch(found).tolist(), strict=False)):
        if request is not None and NOT_FINITE in tokens[len(request.tokens) : length]:
            raise not_finite(row, request.prompt_tokens + length - 1)
        if request is not None and not request.take(tokens[len(request.tokens) : length], bool(active)):
            ended.append(request)
    return ended
