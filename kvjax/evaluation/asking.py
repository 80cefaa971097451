"""Asking a model: a batch of prompts is read and compressed, and each one's questions are answered from its cache."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import KVCache
from kvjax.clock import Clock
from kvjax.evaluation.batches import Ask, Batch
from kvjax.extend import read_prompt
from kvjax.generate import generate
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.sampling import Greedy, SamplingMethod
from kvjax.session import Session
from kvjax.sharding import fetch


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

    def __call__(self, batch: Batch, policy: Policy) -> tuple[list[list[Answer]], Took]:
        """The answers to each reading's questions, and what that took."""
        clock = Clock()
        filled = [*batch.readings, *[batch.readings[-1]] * (batch.rows - len(batch.readings))]
        cache = self._read([reading.prompt for reading in filled], policy, clock)
        kept = fetch(_kept(cache))
        answers: list[list[Answer]] = [[] for _ in batch.readings]
        asked = decoded = written = 0.0
        for asks in zip(*(reading.asks for reading in filled), strict=True):
            out = self._answer(cache, asks, batch)
            asked += out.stats.prefill_seconds
            decoded += out.stats.decode_seconds
            written += out.stats.decoded_tokens
            clock.seconds["compile"] += out.stats.compile_seconds
            for row, mine in enumerate(answers):
                mine.append(
                    Answer(
                        tokens=out.tokens[row, : out.lengths[row]].tolist(),
                        text=out.text[row],
                        kept=[round(float(count), 2) for count in kept[row]],
                        kv_bytes=cache.nbytes // batch.rows,
                        kv_bytes_end=out.stats.cache_bytes // batch.rows,
                    )
                )
        return answers, Took(clock.seconds["prefill"], asked, decoded, clock.seconds["compile"], int(written))

    def _read(self, prompts: Sequence[np.ndarray], policy: Policy, clock: Clock) -> KVCache:
        session = Session.open(self.params, prompts, policy=policy, tokenizer=self.tokenizer, chunk=self.chunk)
        _, cache = read_prompt(
            self.params,
            session.cache,
            session.batch.tokens,
            session.batch.lengths,
            room=0,
            chunk=self.chunk,
            compress="auto",
            texts=session.texts,
            clock=clock,
        )
        return cache

    def _answer(self, cache: KVCache, asks: Sequence[Ask], batch: Batch) -> Any:
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
            max_new_tokens=batch.readings[0].new_tokens,
            sampler=self.sampler,
            seed=seed,
            eos=None if self.ends else (),
            tokenizer=self.tokenizer,
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
