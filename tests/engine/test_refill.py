"""Rows that are refilled: answers are those of `generate`, in whatever company, and rows are used again at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine.refill import ReadBatch, Refill
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.models import Decoder
from kvjax.policies import parse
from tests.products import part
from tests.tiny import decoder

NEW = 24
SAMPLER = kvjax.Sampler(temperature=3.0, repetition_penalty=1.2)
ROWS = 4


@pytest.fixture(scope="module")
def params() -> Decoder:
    return decoder(vocab=len(WORDS))


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, len(WORDS), n).tolist() for n in rng.integers(longest // 2, longest, count)]


def batches(
    params: Decoder, given: Sequence[list[int]], read: Callable[[int], None] = lambda _: None, **options: Any
) -> Iterator[ReadBatch]:
    """Batches of ROWS rows; the last one is filled up. `read` hears of each."""
    for first in range(0, len(given), ROWS):
        numbers = list(range(first, min(first + ROWS, len(given))))
        filled = numbers + numbers[-1:] * (ROWS - len(numbers))
        read(first)
        yield ReadBatch.of(
            params, [given[i] for i in filled], numbers, max_new_tokens=NEW, sampler=SAMPLER, seed=filled, **options
        )


def ends(tokens: Sequence[int]) -> list[int]:
    """End tokens with which some answers end early and some not."""
    return sorted(set(tokens[:6]))


def generated(params: Decoder, given: Sequence[list[int]], **options: Any) -> dict[int, list[int]]:
    """The answers of `generate`, by the number of the prompt. A row's answer does not depend on the other rows."""
    out = kvjax.generate(params, given, max_new_tokens=NEW, sampler=SAMPLER, seed=list(range(len(given))), **options)
    return {i: tokens[:n].tolist() for i, (tokens, n) in enumerate(zip(out.tokens, out.lengths, strict=True))}


POLICIES = ("full", "morphkv:budget=16,window=4", "snapkv:budget=0.5,window=4", "adakv:base=h2o,base.budget=12")


@pytest.mark.parametrize("text", part(POLICIES, POLICIES[:1]))
def test_answers_are_those_of_generate(params: Decoder, text: str) -> None:
    given, policy = prompts(11), parse(text)
    whole = generated(params, given, policy=policy, eos=())
    eos = ends(whole[0])
    taken: list[int] = []
    ended = list(Refill(params).run(batches(params, given, taken.append, policy=policy, eos=eos)))
    found = {one.name: one.tokens for one in ended}
    assert sorted(found) == list(range(11))
    lengths = {len(tokens) for tokens in found.values()}
    assert min(lengths) < NEW == max(lengths), "some answers must end early"
    assert [one.name for one in ended] != sorted(found), "short answers must overtake long ones"
    for i, tokens in whole.items():
        assert found[i] == tokens[: next((n for n, token in enumerate(tokens, 1) if token in eos), NEW)]


@pytest.mark.slow
def test_a_row_that_has_ended_takes_the_next_prompt(params: Decoder) -> None:
    """Of each four answers one is long. Padded batches would take that many steps per batch."""
    given = prompts(1) * 12
    refill, limits = Refill(params), [NEW, 2, 2, 2]

    def read() -> Iterator[ReadBatch]:
        for first in range(0, 12, ROWS):
            batch = ReadBatch.of(params, given[:ROWS], range(first, first + ROWS), max_new_tokens=NEW, eos=())
            rows = batch.rows
            yield ReadBatch(batch.requests, type(rows)(rows.decoding, jax.numpy.array(limits, "int32")))

    ended = [(one.name, len(one.tokens)) for one in refill.run(read())]
    assert sorted(ended) == [(i, limits[i % ROWS]) for i in range(12)]
    assert refill.steps < 1.5 * (NEW - 1)


@pytest.mark.slow
def test_the_next_batch_is_read_while_rows_are_busy(params: Decoder) -> None:
    """It is there before an answer ends, and the one after it is not read before all of its requests have rows."""
    events: list[str] = []
    for ended in Refill(params).run(batches(params, prompts(12), lambda first: events.append(f"read {first}"), eos=())):
        events.append(f"ended {ended.name}")
    assert events[:2] == ["read 0", "read 4"]
    assert set(events[2 : events.index("read 8")]) == {f"ended {i}" for i in range(ROWS)}


SIZES = ("full", "h2o:budget=32", "snapkv:budget=20,window=4", "sliding:full")


@pytest.mark.long
@pytest.mark.parametrize("text", part(SIZES, SIZES[:1]))
@pytest.mark.parametrize("order", [1, -1], ids=["short first", "long first"])
def test_batches_of_other_sizes_share_the_rows(params: Decoder, text: str, order: int) -> None:
    """One answer of the first batch takes NEW steps. The others leave their rows to the second batch in time."""
    params = decoder(vocab=len(WORDS), windows=(8, None)) if text.startswith("sliding:") else params
    policy = parse(text.removeprefix("sliding:"))
    given = [prompts(4, longest=20), prompts(2, longest=90)][::order]
    refill, lengths = Refill(params), []

    def read() -> Iterator[ReadBatch]:
        for i, some in enumerate(given):
            batch = ReadBatch.of(
                params, some, [(i, k) for k in range(len(some))], max_new_tokens=NEW, policy=policy, eos=()
            )
            limits = [5] * (len(some) - 1) + [NEW] if i == 0 else [4] * len(some)
            lengths.append(limits)
            yield ReadBatch(batch.requests, replace(batch.rows, limits=jax.numpy.array(limits, "int32")))

    found = {one.name: one.tokens for one in refill.run(read())}
    for i, some in enumerate(given):
        out = kvjax.generate(params, some, policy=policy, max_new_tokens=NEW, eos=())
        for k, limit in enumerate(lengths[i]):
            assert found[i, k] == out.tokens[k, :limit].tolist()
    assert refill.steps == NEW - 1, "the rows of one batch must serve both"


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_small_batches_have_rows_for_later_ones_beside_them(params: Decoder, data: int) -> None:
    """Three batches of four answers, one row of which is left over, are answered together in twelve rows."""
    given, policy = prompts(11), parse("morphkv:budget=16,window=4")
    whole = generated(params, given, policy=policy, eos=())
    params = kvjax.shard(params, kvjax.make_mesh(data=data)) if data > 1 else params
    refill = Refill(params, rows=3 * ROWS + 1)
    assert {one.name: one.tokens for one in refill.run(batches(params, given, policy=policy, eos=()))} == whole
    assert refill.steps < 1.5 * NEW


@pytest.mark.slow
def test_single_tokens_take_no_row(params: Decoder) -> None:
    given, refill = prompts(11), Refill(params)
    one = ReadBatch.of(params, given, range(11), max_new_tokens=1)
    first = {ended.name: ended.tokens for ended in refill.run(iter([one]))}
    assert refill.steps == 0
    assert first == dict(enumerate(kvjax.generate(params, given, max_new_tokens=1).tokens.tolist()))
    assert list(Refill(params).run(iter([]))) == []


@pytest.mark.long
def test_stop_strings_end_answers_as_in_a_stream(params: Decoder) -> None:
    given, options = prompts(7), {"eos": (), "tokenizer": tokenizer(), "stop": [" the", "a"]}
    ended = {one.name: one for one in Refill(params).run(batches(params, given, **options))}
    seeds = list(range(len(given)))
    pieces = list(kvjax.stream(params, given, max_new_tokens=NEW, sampler=SAMPLER, seed=seeds, **options))
    for i in seeds:
        assert ended[i].text == "".join(piece.text[i] for piece in pieces if piece.text), i
        assert ended[i].tokens == [int(piece.tokens[i]) for piece in pieces if piece.tokens[i] >= 0], i
    assert min(len(one.tokens) for one in ended.values()) < NEW


@pytest.mark.slow
def test_a_mesh_answers_the_same(params: Decoder) -> None:
    """Rows of a batch move to other devices of `data` when they are placed."""
    given, policy = prompts(9), parse("morphkv:budget=16,window=4")
    eos = ends(generated(params, given, policy=policy)[0])
    found = []
    for one in (params, kvjax.shard(params, kvjax.make_mesh(data=2, model=2))):
        ended = Refill(one).run(batches(one, given, policy=policy, eos=eos))
        found.append({request.name: request.tokens for request in ended})
    assert found[0] == found[1]
