"""Runs whose rows are refilled: the results file of padded batches, whatever happens on the way to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from kvjax.decoding.sampling import Sampler
from kvjax.evaluation.asking import Asker, Ended, Took
from kvjax.evaluation.batches import ReadingBatch, readings
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.vocabulary import tokenizer
from kvjax.models import Decoder
from kvjax.policies import parse
from tests.evaluation import words
from tests.evaluation.test_asking import item
from tests.evaluation.test_asking import params as params  # a fixture
from tests.evaluation.test_runner import GRID, Notes, lines, plan, right, run
from tests.tiny import latent_config

REFILLED = GRID.but(refill=True)
BATCHES = sum(len(cell.batches) for cell in plan().cells)
READINGS = sum(len(batch.readings) for cell in plan().cells for batch in cell.batches)


class Rows:
    """Answers correctly. The first batch ends last, and answers end in reverse order, as they might in rows."""

    def __init__(self, before: Callable[[ReadingBatch], None] = lambda _: None) -> None:
        self.before = before
        self.padded: list[ReadingBatch] = []
        self.read: list[ReadingBatch] = []
        self.rows: set[int] = set()

    def __call__(self, batch: ReadingBatch, policies: Any) -> Any:
        self.padded.append(batch)
        return right(batch, policies)

    def refilled(self, batches: Iterable[ReadingBatch], policy: Any, rows: int) -> Iterator[Ended]:
        self.rows.add(rows)
        open_: list[ReadingBatch] = []
        for batch in batches:
            self.before(batch)
            self.read.append(batch)
            open_.append(batch)
            if len(open_) > 1:
                yield from self.ended(open_.pop(), policy)
        for batch in open_:
            yield from self.ended(batch, policy)

    def ended(self, batch: ReadingBatch, policy: Any) -> Iterator[Ended]:
        ((_, answers, took),) = right(batch, [policy])
        each = [(r, i, one) for r, mine in zip(batch.readings, answers, strict=True) for i, one in enumerate(mine)]
        for reading, index, answer in reversed(each):
            last = reading is each[0][0] and index == 0
            yield Ended(batch, reading, index, answer, took if last else None)


@pytest.fixture
def expected(tmp_path: Path) -> bytes:
    run(plan(), right, tmp_path / "padded")
    return (tmp_path / "padded" / "results.jsonl").read_bytes()


def test_the_results_file_is_that_of_padded_batches(tmp_path: Path, expected: bytes) -> None:
    notes, rows = Notes(), Rows()
    summary = run(plan(REFILLED), rows, tmp_path / "rows", notes)
    assert notes.said == []
    assert summary.new == summary.planned == notes.done
    assert not rows.padded
    assert (tmp_path / "rows" / "results.jsonl").read_bytes() == expected
    timings = lines(tmp_path / "rows", "timings.jsonl")
    assert len(timings) == len(rows.read) == BATCHES
    assert sum(line["answers"] for line in timings) == summary.planned
    assert {line["shared"] for line in timings} == {1}


def test_a_run_that_ends_early_keeps_each_answer(tmp_path: Path, expected: bytes) -> None:
    """Its lines are written one by one, and only the prompts without an answer are read again."""

    class Killed(BaseException):
        pass

    def killed(batch: ReadingBatch) -> None:
        if killer.read[2:]:
            raise Killed

    killer = Rows(killed)
    with pytest.raises(Killed):
        run(plan(REFILLED), killer, tmp_path / "rows")
    there = Counter((line["task"], line["id"]) for line in lines(tmp_path / "rows"))
    whole = sum(count == (4 if task == "demo/keys" else 1) for (task, _), count in there.items())
    assert whole
    rows = Rows()
    summary = run(plan(REFILLED), rows, tmp_path / "rows")
    assert summary.new < summary.planned == summary.answers
    assert sum(len(batch.readings) for batch in rows.read) == READINGS - whole
    assert (tmp_path / "rows" / "results.jsonl").read_bytes() == expected


def test_an_error_affects_its_example_alone(tmp_path: Path, expected: bytes) -> None:
    """The batches in rows are asked one by one, and later ones in rows again."""

    def fails(batch: ReadingBatch) -> None:
        if any(ask.item.example.id == "1024-3" for reading in batch.readings for ask in reading.asks):
            raise RuntimeError("the policy is at a loss")

    class Unlucky(Rows):
        def __call__(self, batch: ReadingBatch, policies: Any) -> Any:
            fails(batch)
            return super().__call__(batch, policies)

    rows, notes = Unlucky(fails), Notes()
    summary = run(plan(REFILLED), rows, tmp_path / "rows", notes)
    assert "full: RuntimeError: the policy is at a loss; the run asks 2 batches one by one" in notes.said
    wrong = [line for line in lines(tmp_path / "rows") if "error" in line]
    assert {(line["task"], line["id"]) for line in wrong} == {("demo/keys", "1024-3"), ("demo/needle", "1024-3")}
    assert len(wrong) == len(summary.errors) == summary.planned - summary.answers == 6 * 5
    assert rows.read
    run(plan(REFILLED), Rows(), tmp_path / "rows")
    assert (tmp_path / "rows" / "results.jsonl").read_bytes() == expected


def test_out_of_memory_halves_the_rows(tmp_path: Path, expected: bytes) -> None:
    def full(batch: ReadingBatch) -> None:
        if batch.rows > 2:
            raise MemoryError

    notes, rows = Notes(), Rows(full)
    assert run(plan(REFILLED), rows, tmp_path / "rows", notes).errors == ()
    assert notes.said[0] == "full: out of memory with 4 prompts; the run continues with 2"
    assert len(notes.said) == len(plan(REFILLED).sweeps)
    assert {batch.rows for batch in [*rows.read, *rows.padded]} == {2}
    assert rows.rows == {4, 2}
    assert (tmp_path / "rows" / "results.jsonl").read_bytes() == expected


def test_tasks_and_grids_say_where_rows_are_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, task in registry.TASKS.items() if task.varied} == {
        "longgenbench/16k", "longgenbench/32k", "longwriter/write", "longwriter/write_en", "longwriter/ruler",
        "math/gsm8k", "math/math500", "math/aime24",
    }  # fmt: skip

    def refilled(varied: bool, **fields: Any) -> set[bool]:
        grid = Grid.of({"tasks": ["test/*"], "policies": ["full", "h2o:budget=8"], **fields})
        given = [words.example("one", "adam alan", " what is adam :")]
        sweeps = plan(grid, words.items(monkeypatch, grid, tokenizer(), given, varied=varied)).sweeps
        assert all(len(sweep.cells) == 1 for sweep in sweeps if sweep.refilled)
        return {sweep.refilled for sweep in sweeps}

    assert refilled(True) == {True}
    assert refilled(False) == {False}
    assert refilled(True, refill=False) == {False}
    assert refilled(False, refill=True) == {True}
    assert refilled(True, ends=False) == {False}
    with pytest.raises(ValueError, match="refill: true with ends: false: expected one of them"):
        refilled(True, ends=False, refill=True)


def test_the_rows_that_wait_take_memory_too() -> None:
    def most(grid: Grid) -> int:
        ready = plan(grid.but(policies=["full"], question="before"))
        return max(ready.batch_bytes(batch, [parse("full")]) for cell in ready.cells for batch in cell.batches)

    assert 1.3 * most(GRID) < most(REFILLED) < 2 * most(GRID)


def test_batches_share_rows_if_their_lengths_are_alike_and_the_memory_holds_the_longest() -> None:
    """The longest prompt of each batch, in the order in which they are read."""
    sizes = [300, 120, 80, 80, 40, 40, 40, 30]
    items = [replace(item(f"{i}", size, 1, new_tokens=64), refilled=True) for i, size in enumerate(sizes)]

    def read(**fields: Any) -> list[list[tuple[int, int]]]:
        sweeps = plan(GRID.but(policies=["full"], question="before", refill=True, **fields), items).sweeps
        return [[(batch.readings[0].prompt.size, batch.rows) for batch in sweep.batches] for sweep in sweeps]

    assert read(batch=4) == [[(300, 1)], [(40, 4), (80, 2), (120, 1)], [(30, 1)]]
    row = plan(GRID.but(refill=True), items).row_bytes(readings(items[1:2], "before")[0], [parse("full")])
    assert read(batch=4, memory_gb=4.1 * row / 1e9) == read(batch=4)
    assert read(batch=4, memory_gb=3.9 * row / 1e9) != read(batch=4)

    def together(**fields: Any) -> list[int]:
        ready = plan(GRID.but(policies=["full"], question="before", refill=True, **fields), items)
        return [ready.rows_together(sweep.batches, parse("full")) for sweep in ready.sweeps]

    assert together(batch=4) == [1, 4, 1]
    assert together(batch=16) == [1, 8, 1]  # six prompts of sizes with at most four each
    assert together(batch=16, memory_gb=5 * row / 1e9) == [1, 4, 1]


def test_values_of_latents_take_memory_where_a_policy_changes_entries() -> None:
    """A model of the same kv heads without latents always holds them."""
    reading, latents = readings([item("0", 300, 1)], "after")[0], latent_config()

    def bytes_of(text: str) -> list[int]:
        plans = (replace(plan(), config=config) for config in (latents, replace(latents, latent=None)))
        return [one.row_bytes(reading, [parse(text)]) for one in plans]

    once, apart = bytes_of("snapkv:budget=40")
    assert 1.7 * once < apart < 2 * once
    changed, apart = bytes_of("attention_matching:base=snapkv,base.budget=40")
    assert changed == apart


@pytest.mark.slow
def test_a_model_writes_the_same_file_either_way(
    tmp_path: Path, params: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts with one and two questions, of which some share a prefix of the prompt, before and after; sampled."""
    ask = Asker(params, tokenizer(), Sampler(temperature=3.0), seed=3)
    context, questions = "the code of adam is sword . ", (" what is adam :", " the code of")
    given = [words.example(f"{i}", context * (3 + i % 2), *questions[: 1 + i % 3]) for i in range(9)]
    found, timings = [], []
    for refill in (False, True):
        grid = Grid.of({"tasks": ["test/*"], "policies": ["snapkv:budget=0.5,window=4"], "question": "both"})
        grid = grid.but(refill=refill, new_tokens=40, seed=3, batch=2)
        items = words.items(monkeypatch, grid, tokenizer(), given, max_positions=128)
        ready = RunPlan(grid, tuple(items), (), params.config, jax.numpy.dtype("float32"))
        out, notes = tmp_path / str(refill), Notes()
        assert run(ready, ask, out, notes).errors == ()
        assert notes.said == []
        found.append((out / "results.jsonl").read_bytes())
        timings.append(lines(out, "timings.jsonl"))
    assert found[0] == found[1]
    written = {len(json.loads(line)["tokens"]) for line in found[0].splitlines()}
    assert len(written) > 3, "answers must differ in length"
    tokens = sum(len(json.loads(line)["tokens"]) - 1 for line in found[0].splitlines())
    assert tokens == sum(line["decoded_tokens"] for line in timings[1])  # there are no rows that only fill a batch
    for name in ("answers", "prompts"):
        assert sum(line[name] for line in timings[0]) == sum(line[name] for line in timings[1]) > 0
    assert {*Took.__dataclass_fields__} <= {*timings[1][0]}
    assert all(line["read_seconds"] > 0 for line in timings[1])
