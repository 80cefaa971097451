"""Asking a model: a batch of prompts is read, compressed under each policy, and what is asked of it answered."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import KVCache
from kvjax.clock import Clock
from kvjax.evaluation.batches import Ask, Batch
from kvjax.generate import Generation, generate, prefill
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.sampling import Greedy, SamplingMethod
from kvjax.sharding import fetch
from kvjax.sweep import prefill_each


@dataclass(frozen=True)
class Answer:
    """What a model wrote, and what it wrote it from.

    Attributes:
        tokens: ids, the end token included.
        text: without special tokens.
        kept: entries a kv head kept of the prompt, in the mean over the heads of each layer.
        kv_bytes: of this row's cache when its prompt was compressed.
        kv_bytes_end: when the answer had been written, or more was about to be.
    """

    tokens: list[int]
    text: str
    kept: list[float]
    kv_bytes: int
    kv_bytes_end: int


Answers: TypeAlias = list[list[Answer]]
"""By reading of a batch, and by question."""


@dataclass(frozen=True)
class Took:
    """Wall-clock seconds of a batch, compilation apart, and the tokens that were decoded in it, of all rows."""

    read_seconds: float
    ask_seconds: float
    decode_seconds: float
    compile_seconds: float
    decoded_tokens: int


@dataclass(frozen=True)
class Asker:
    """A model that is asked.

    Attributes:
        seed: draws depend on it, on the task, the example and the question, and on nothing else.
        chunk: prompts are read so many tokens at a time.
        ends: whether answers stop at an end token.
    """

    params: Decoder
    tokenizer: Any
    sampler: SamplingMethod
    seed: int = 0
    chunk: int | None = None
    ends: bool = True

    def __call__(self, batch: Batch, policies: Sequence[Policy]) -> Iterator[tuple[Answers, Took]]:
        """The answers to each reading's questions under each policy, and what they took.

        Several policies must read alike, see `kvjax.prefill_each`; what they share is counted once, with the first.
        """
        filled = [*batch.readings, *[batch.readings[-1]] * (batch.rows - len(batch.readings))]
        prompts, columns = [reading.prompt for reading in filled], list(zip(*(r.asks for r in filled), strict=True))
        clock = Clock()
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "chunk": self.chunk, "clock": clock}
        share: Callable[..., Iterator[KVCache]] = partial(prefill_each, self.params, policies=policies, **options)
        if columns[0][0].lead.size:  # each question has caches of its own, which begin with the text's
            text = prefill(self.params, prompts, policy=policies[0], compress="never", **options)
            tallies = [Tally(self, batch) for _ in policies]
            for asks in columns:
                leads = [ask.lead for ask in asks]
                for tally, cache in zip(tallies, share(leads, cache=text), strict=True):
                    tally.add(cache, asks, clock)
            yield from ((tally.answers, tally.took) for tally in tallies)
            return
        one = len(policies) == 1  # then a layer is compressed before the next one reads
        for cache in [prefill(self.params, prompts, policy=policies[0], **options)] if one else share(prompts):
            tally = Tally(self, batch)
            for asks in columns:
                tally.add(cache, asks, clock)
            yield tally.answers, tally.took

    def answer(self, cache: KVCache, asks: Sequence[Ask], new_tokens: int) -> Generation:
        """What follows each row's question."""
        tails: list[np.ndarray] | None = [ask.tail for ask in asks]
        if all(ask.tail.size == 1 for ask in asks):  # a decode step, which a turn of one token is not
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
    """The answers of a batch under one policy, and what they took."""

    def __init__(self, asker: Asker, batch: Batch):
        self._asker, self._batch = asker, batch
        self.answers: Answers = [[] for _ in batch.readings]
        self.took = Took(0, 0, 0, 0, 0)

    def add(self, cache: KVCache, asks: Sequence[Ask], clock: Clock) -> None:
        """Asks a question of each row. What the clock has counted goes to this policy, and is counted no more."""
        rows, kept = self._batch.rows, fetch(_kept(cache))
        out = self._asker.answer(cache, asks, self._batch.readings[0].new_tokens)
        assert out.text is not None
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


@jax.jit
def _kept(cache: KVCache) -> Float[Array, "B L"]:
    """Entries of each row and layer, in the mean over kv heads."""
    if cache.pool is not None:
        return jnp.mean(cache.pool.used.astype(jnp.float32), axis=1)
    return jnp.stack([jnp.mean(layer.occupancy.astype(jnp.float32), axis=1) for layer in cache.layers], axis=1)
