"""Prefills a batch of prompts, compresses it under each policy and generates the answers to its questions."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.clock import Clock
from kvjax.evaluation.batches import Ask, ReadingBatch
from kvjax.generate import Generation, generate
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.prefill_each import begin_each, prefill_each
from kvjax.programs import jit
from kvjax.sampling import Greedy, SamplingMethod
from kvjax.sharding import fetch


@dataclass(frozen=True)
class Answer:
    """The answer to one question, and the size of the cache that it was generated from.

    Attributes:
        tokens: the ids of the answer, including the end token.
        text: the decoded answer without special tokens.
        kept: the number of prompt entries that a kv head retained, per layer, averaged over the layer's kv heads.
        kv_bytes: bytes allocated for this row's cache after its prompt was compressed.
        kv_bytes_end: bytes allocated for this row's cache after its answer was generated.
    """

    tokens: list[int]
    text: str
    kept: list[float]
    kv_bytes: int
    kv_bytes_end: int


Answers: TypeAlias = list[list[Answer]]
"""Indexed by the reading within its batch and by the question within the reading."""


@dataclass(frozen=True)
class Took:
    """Wall-clock seconds of a batch, with compilation counted separately, and the tokens that all its rows decoded."""

    read_seconds: float
    ask_seconds: float
    decode_seconds: float
    compile_seconds: float
    decoded_tokens: int


@dataclass(frozen=True)
class Asker:
    """A callable that answers batches of questions with one model and one sampler.

    Attributes:
        params: the model.
        tokenizer: the model's tokenizer.
        sampler: draws the tokens of the answers.
        seed: the seed of the draws. A draw depends only on the seed, the task, the example and the question.
        chunk: the number of tokens that prefill reads at a time; None reads the prompt at once.
        ends: whether answers stop at an end token.
    """

    params: Decoder
    tokenizer: Any
    sampler: SamplingMethod
    seed: int = 0
    chunk: int | None = None
    ends: bool = True

    def __call__(self, batch: ReadingBatch, policies: Sequence[Policy]) -> Iterator[tuple[Answers, Took]]:
        """Yields, for each policy, the answers to the batch's questions and the time that they took.

        Several policies must be able to share one prefill, see `kvjax.prefill_each`. The time of that prefill is
        counted once, under the first policy.
        """
        filled = [*batch.readings, *[batch.readings[-1]] * (batch.rows - len(batch.readings))]
        prompts, columns = [reading.prompt for reading in filled], list(zip(*(r.asks for r in filled), strict=True))
        clock = Clock()
        options: dict[str, Any] = {
            "policies": policies,
            "tokenizer": self.tokenizer,
            "chunk": self.chunk,
            "clock": clock,
        }
        tallies = [Tally(self, batch) for _ in policies]
        if columns[0][0].lead.size:  # each question has caches of its own, which extend the cache of the context
            text = begin_each(self.params, prompts, **options)
            for asks in columns:
                leads = [ask.lead for ask in asks]
                caches = prefill_each(self.params, leads, cache=text, **options)
                for tally, cache in zip(tallies, caches, strict=True):
                    tally.add(cache, asks, clock)
            yield from ((tally.answers, tally.took) for tally in tallies)
            return
        for tally, cache in zip(tallies, prefill_each(self.params, prompts, **options), strict=True):
            for asks in columns:
                tally.add(cache, asks, clock)
            yield tally.answers, tally.took

    def answer(self, cache: KVCache, asks: Sequence[Ask], new_tokens: int) -> Generation:
        """Generates the answer to each row's question."""
        tails: list[np.ndarray] | None = [ask.tail for ask in asks]
        if all(ask.tail.size == 1 for ask in asks):  # a turn of one token would run prefill instead of a decode step
            pending = cache.put_rows(np.array([ask.tail[0] for ask in asks], np.int32))
            cache, tails = replace(cache, pending=jnp.asarray(pending)), None
        seed: int | list[int] = self.seed
        if not isinstance(self.sampler, Greedy):
            seed = [_seed(self.seed, ask) for ask in asks]
        return generate(
            self.params,
            tails,
            cache=cache,
            max_new_tokens=new_tokens,
            sampler=self.sampler,
            seed=seed,
            eos=None if self.ends else (),
            tokenizer=self.tokenizer,
        )


class Tally:
    """The answers of a batch under one policy and their times, accumulated question by question."""

    def __init__(self, asker: Asker, batch: ReadingBatch):
        self._asker, self._batch = asker, batch
        self.answers: Answers = [[] for _ in batch.readings]
        self.took = Took(0, 0, 0, 0, 0)

    def add(self, cache: KVCache, asks: Sequence[Ask], clock: Clock) -> None:
        """Answers one question per row. The times on the clock move to this policy and are removed from the clock."""
        rows, kept = self._batch.rows, fetch(_kept(cache))
        out = self._asker.answer(cache, asks, self._batch.readings[0].new_tokens)
        assert isinstance(out.text, list)
        for row, mine in enumerate(self.answers):
            mine.append(
                Answer(
                    tokens=out.tokens[row, : out.lengths[row]].tolist(),
                    text=out.text[row],
                    kept=[round(float(count), 2) for count in kept[row]],
                    kv_bytes=cache.nbytes // rows,
                    kv_bytes_end=out.stats.cache_bytes // rows,
                )
            )
        self.took = Took(
            self.took.read_seconds + clock.seconds.pop("prefill", 0.0),
            self.took.ask_seconds + out.stats.prefill_seconds,
            self.took.decode_seconds + out.stats.decode_seconds,
            self.took.compile_seconds + clock.seconds.pop("compile", 0.0) + out.stats.compile_seconds,
            self.took.decoded_tokens + int(out.stats.decoded_tokens),
        )


def _seed(seed: int, ask: Ask) -> int:
    item = ask.item
    return zlib.crc32(f"{seed} {item.task.name} {item.length} {item.example.id} {ask.index}".encode())


@jit
def _kept(cache: KVCache) -> Float[Array, "B L"]:
    """The number of retained entries of each of B rows and L layers, averaged over kv heads."""
    return cache.entries.held()
