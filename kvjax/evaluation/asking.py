"""Prefills a batch of prompts, compresses it under each policy and generates the answers to its questions."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.decoding.sampling import Greedy, SamplingMethod, parse
from kvjax.engine.refill import ReadBatch, Refill
from kvjax.evaluation import programs
from kvjax.evaluation.batches import Ask, Reading, ReadingBatch
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.turns import Group, Turn, Waiting
from kvjax.generate import Stats, generate
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.prefill_each import begin_each, prefill_each
from kvjax.runtime.clock import Clock


@dataclass(frozen=True)
class Answer:
    """The answer to one question, and the size of the cache that it was generated from.

    Attributes:
        tokens: the ids of the answer, including the end token.
        text: the decoded answer without special tokens.
        kept: the number of prompt entries that a kv head retained, per layer, averaged over the layer's kv heads.
        kv_bytes: bytes allocated for this row's cache after its prompt was compressed.
        kv_bytes_end: bytes allocated for this row's cache after its answer was generated.
        retained: of the first example of a task and length, a digit for each token of the compressed prompt, as
            `_shown` writes it; None for the other examples.
    """

    tokens: list[int]
    text: str
    kept: list[float]
    kv_bytes: int
    kv_bytes_end: int
    retained: str | None = None


Answers: TypeAlias = list[list[Answer]]
"""Indexed by the reading within its batch and by the question within the reading."""


@dataclass(frozen=True)
class Took:
    """Wall-clock seconds of a batch, with compilation counted separately, and the tokens that all its rows decoded.

    Policies whose questions were answered together have equal shares of these; `together` is the number of policies.
    """

    read_seconds: float = 0.0
    ask_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decoded_tokens: int = 0
    together: int = 1

    @classmethod
    def of(cls, stats: Stats, turns: int, policies: int) -> Took:
        """The share of one of several turns, of some policies, in the time of their answers."""
        return cls(
            ask_seconds=stats.prefill_seconds / turns,
            decode_seconds=stats.decode_seconds / turns,
            compile_seconds=stats.compile_seconds / turns,
            decoded_tokens=int(stats.decoded_tokens) // turns,
            together=policies,
        )

    def __add__(self, other: Took) -> Took:
        sums = {name: getattr(self, name) + getattr(other, name) for name in asdict(self) if name != "together"}
        return Took(**sums, together=max(self.together, other.together))


@dataclass(frozen=True)
class Ended:
    """An answer that has ended in a row that is refilled.

    Attributes:
        batch: the batch of the question.
        reading: the prompt.
        index: the index of the question within the reading.
        answer: the answer.
        took: once all answers of the batch have ended: the seconds of reading it, and of decoding all rows since the
            batch that ended before it.
    """

    batch: ReadingBatch
    reading: Reading
    index: int
    answer: Answer
    took: Took | None


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
        rows: the most rows that take their decode steps together, of one or more policies; None for a batch of one
            policy.
    """

    params: Decoder
    tokenizer: Any
    sampler: SamplingMethod
    seed: int = 0
    chunk: int | None = None
    ends: bool = True
    rows: int | None = None

    @classmethod
    def of(cls, grid: Grid, params: Decoder, tokenizer: Any) -> Asker:
        """The asker of a grid."""
        sampler = parse(grid.sampler)
        return cls(params, tokenizer, sampler, grid.seed, grid.chunk, grid.ends, grid.decode_rows)

    def __call__(self, batch: ReadingBatch, policies: Sequence[Policy]) -> Iterator[tuple[int, Answers, Took]]:
        """Yields the index of each policy, its answers to the batch's questions, and the time that they took.

        Several policies must be able to share one prefill, see `kvjax.prefill_each`. The time of that prefill is
        counted once, under the first policy. Policies come in the order in which their answers are complete.
        """
        clock, waiting = Clock(), Waiting(self.rows)
        states = [_Answering(batch, {}) for _ in policies]
        for i, column, asks, cache in self._read(batch, policies, clock):
            facts = _facts(batch, asks, cache)
            read, compiled = (clock.seconds.pop(name, 0.0) for name in ("prefill", "compile"))  # of this policy alone
            states[i].took += Took(read_seconds=read, compile_seconds=compiled)
            group = waiting.add(Turn(i, column, asks, facts), cache)
            del cache  # the group holds it
            if group is not None:
                yield from self._answered(batch, group, states)
        for group in waiting.rest():
            yield from self._answered(batch, group, states)

    def _answered(
        self, batch: ReadingBatch, group: Group, states: Sequence[_Answering]
    ) -> Iterator[tuple[int, Answers, Took]]:
        """Answers the questions of a group. Yields the policies whose answers are complete with them."""
        asks, cache = [ask for turn in group.turns for ask in turn.asks], group.joined()
        out = generate(self.params, **self._options(cache, asks, batch))
        assert isinstance(out.text, list)
        names = [turn.policy for turn in group.turns]
        end, share = out.stats.cache_bytes // cache.batch_size, Took.of(out.stats, len(group.turns), len({*names}))
        del cache
        for i, turn in enumerate(group.turns):
            state = states[turn.policy]
            state.took += share
            for row, facts in enumerate(turn.facts):
                at = i * batch.rows + row
                tokens, text = out.tokens[at, : out.lengths[at]].tolist(), out.text[at]
                state.found[row, turn.column] = Answer(tokens=tokens, text=text, kv_bytes_end=end, **facts)
            if state.complete:
                yield turn.policy, state.answers, state.took

    def refilled(self, batches: Iterable[ReadingBatch], policy: Policy, rows: int) -> Iterator[Ended]:
        """Yields the answers to the questions of many batches under one policy, in the order in which they end.

        A row takes the next prompt as soon as its answer has ended. The next batch is taken when a row is free, and
        read as the others are; a reading of each question counts as a batch here.

        Args:
            rows: how many are answered together, if a batch has no more.
        """
        reading, refill, decoded = Clock(), Refill(self.params, rows), 0

        def read() -> Iterator[ReadBatch]:
            for batch in batches:
                state = _Open(batch, left=sum(len(reading.asks) for reading in batch.readings))
                for _, column, asks, cache in self._read(batch, [policy], reading):
                    facts, turn = _facts(batch, asks, cache), Clock()
                    names = [_Asked(state, row, column, known) for row, known in enumerate(facts)]
                    made = ReadBatch.of(self.params, names=names, clock=turn, **self._options(cache, asks, batch))
                    for known in facts:
                        known["kv_bytes_end"] = made.nbytes // batch.rows
                    state.read_seconds += reading.seconds.pop("prefill", 0.0)
                    state.ask_seconds += turn.seconds["prefill"]
                    state.compile_seconds += reading.seconds.pop("compile", 0.0) + turn.seconds["compile"]
                    yield made

        for ended in refill.run(read()):
            asked: _Asked = ended.name
            state, batch = asked.state, asked.state.batch
            decoded += len(ended.tokens) - 1
            state.left -= 1
            took = None
            if not state.left:  # the times of rows count for the batch that ends next
                seconds = refill.clock.seconds
                compiled = state.compile_seconds + seconds.pop("compile", 0.0)
                took = Took(state.read_seconds, state.ask_seconds, seconds.pop("decode", 0.0), compiled, decoded)
                decoded = 0
            text = self.tokenizer.decode(ended.tokens, skip_special_tokens=True)
            answer = Answer(tokens=ended.tokens, text=text, **asked.facts)
            yield Ended(batch, batch.readings[asked.row], asked.column, answer, took)

    def _read(
        self, batch: ReadingBatch, policies: Sequence[Policy], clock: Clock
    ) -> Iterator[tuple[int, int, Sequence[Ask], KVCache]]:
        """Prefills a batch. Yields the indices of a policy and a question, the question of each row, and its cache."""
        filled = [*batch.readings, *[batch.readings[-1]] * (batch.rows - len(batch.readings))]
        prompts, columns = [reading.prompt for reading in filled], list(zip(*(r.asks for r in filled), strict=True))
        sizes = batch.rows, batch.readings[0].size, batch.readings[0].new_tokens
        options: dict[str, Any] = {
            "policies": policies,
            "tokenizer": self.tokenizer,
            "chunk": self.chunk,
            "clock": clock,
        }
        if columns[0][0].lead.size:  # each question has caches of its own, which extend the cache of the context
            text = begin_each(self.params, prompts, **options)
            for column, asks in enumerate(columns):
                leads = [ask.lead for ask in asks]
                for i, cache in enumerate(prefill_each(self.params, leads, cache=text, **options)):
                    programs.make_room((policies[i], *sizes))
                    yield i, column, asks, cache
            return
        for i, cache in enumerate(prefill_each(self.params, prompts, **options)):
            programs.make_room((policies[i], *sizes))
            for column, asks in enumerate(columns):
                yield i, column, asks, cache

    def _options(self, cache: KVCache, asks: Sequence[Ask], batch: ReadingBatch) -> dict[str, Any]:
        """The arguments of `generate` that answer each row's question."""
        tails: list[np.ndarray] | None = [ask.tail for ask in asks]
        if all(ask.tail.size == 1 for ask in asks):  # a turn of one token would run prefill instead of a decode step
            pending = cache.put_rows(np.array([ask.tail[0] for ask in asks], np.int32))
            cache, tails = replace(cache, pending=jnp.asarray(pending)), None
        seed: int | list[int] = self.seed
        if not isinstance(self.sampler, Greedy):
            seed = [_seed(self.seed, ask) for ask in asks]
        return {
            "prompt": tails,
            "cache": cache,
            "max_new_tokens": batch.readings[0].new_tokens,
            "sampler": self.sampler,
            "seed": seed,
            "eos": None if self.ends else (),
            "tokenizer": self.tokenizer,
        }


@dataclass
class _Answering:
    """The answers to a batch under one policy so far, by reading and question, and the time that they took."""

    batch: ReadingBatch
    found: dict[tuple[int, int], Answer]
    took: Took = Took()

    @property
    def complete(self) -> bool:
        return len(self.found) == sum(len(reading.asks) for reading in self.batch.readings)

    @property
    def answers(self) -> Answers:
        each = enumerate(self.batch.readings)
        return [[self.found[row, column] for column in range(len(reading.asks))] for row, reading in each]


@dataclass
class _Open:
    """A batch whose answers have not all ended: how many are left, and the seconds of its reading."""

    batch: ReadingBatch
    left: int
    read_seconds: float = 0.0
    ask_seconds: float = 0.0
    compile_seconds: float = 0.0


@dataclass
class _Asked:
    """A question of a batch, by its row and its index, and the facts of its cache."""

    state: _Open
    row: int
    column: int
    facts: dict[str, Any]


def _facts(batch: ReadingBatch, asks: Sequence[Ask], cache: KVCache) -> list[dict[str, Any]]:
    """The fields of an answer that describe its cache before the question, for each prompt of a batch."""
    kept, shown, size = fetch(_kept(cache)), _shown(batch, asks, cache), cache.nbytes // cache.batch_size
    return [
        {"kept": [round(float(count), 2) for count in kept[row]], "kv_bytes": size} | shown.get(row, {})
        for row in range(len(batch.readings))
    ]


def _shown(batch: ReadingBatch, asks: Sequence[Ask], cache: KVCache) -> dict[int, dict[str, Any]]:
    """Returns what is recorded of the rows with the first example of a task, beside the facts of all rows.

    A digit stands for each token: 0 if no kv head of any layer has an entry of it, 9 if all have; rounded up.
    """
    rows = [row for row, reading in enumerate(batch.readings) if reading.asks[0].item.pieces]
    if not rows:
        return {}
    heads = sum(heads.number for heads in cache.entries.heads)
    lengths = [reading.prompt.size + ask.lead.size for reading, ask in zip(batch.readings, asks, strict=False)]
    shares = cache.retained_mask().sum(axis=(1, 2)) / heads
    digits = np.ceil(9 * shares).astype(int).astype(str)
    return {row: {"retained": "".join(digits[row, : lengths[row]])} for row in rows}


def _seed(seed: int, ask: Ask) -> int:
    item = ask.item
    return zlib.crc32(f"{seed} {item.task.name} {item.length} {item.example.id} {ask.index}".encode())


@jax.jit
def _kept(cache: KVCache) -> Float[Array, "B L"]:
    """The number of retained entries of each of B rows and L layers, averaged over kv heads."""
    return cache.entries.held()
