"""Tests runs with a function in place of the model: their records, errors and interruptions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from kvjax.evaluation.asking import Answer, Answers, Took
from kvjax.evaluation.batches import Ask, ReadingBatch
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.records import Records
from kvjax.evaluation.runner import Silent, Summary, Watch
from kvjax.evaluation.runner import run as run_plan
from kvjax.evaluation.tasks.task import Example, Fault
from kvjax.evaluation.tasks.vocabulary import tokenizer
from kvjax.policies import parse
from kvjax.policy import Policy
from tests.evaluation import words
from tests.tiny import decoder

GRID = Grid.of(
    {
        "tasks": [{"name": name, "lengths": [1024]} for name in ("demo/keys", "demo/needle")],
        "limit": 5,
        "policies": ["full", "snapkv:budget={budget}"],
        "budgets": [0.5, 0.25],
        "question": "both",
        "batch": 4,
    }
)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(ValueError, match="file is a file: expected a folder"):
            run_plan(plan(found=[]), pytest.fail, out)
    assert (tmp_path / "file").read_text() == "mine"


def plan(grid: Grid = GRID, found: Sequence[Item | Refusal] | None = None) -> RunPlan:
    found = list(read_items(grid, tokenizer(), 4096)) if found is None else found
    return RunPlan(
        grid,
        tuple(item for item in found if isinstance(item, Item)),
        tuple(refusal for refusal in found if isinstance(refusal, Refusal)),
        decoder().config,
        jax.numpy.dtype("float32"),
    )


def known(ask: Ask) -> str:
    """The first reference; any text if there is none."""
    return next(iter(ask.item.example.questions[ask.index].answers), "a text of a few words")


def right(batch: ReadingBatch, policies: Sequence[Policy]) -> Iterator[tuple[int, Answers, Took]]:
    """Answers every question correctly."""
    for i, _ in enumerate(policies):
        answers = [
            [Answer([len(ask.tail)], known(ask), [1.5, 2.0], 10, 20) for ask in reading.asks]
            for reading in batch.readings
        ]
        yield i, answers, Took(0.1, 0.2, 0.3, 0.0, 5)


def run(asked: RunPlan, answers: Any, out: Path, watch: Watch | None = None) -> Summary:
    """Runs a plan with a function in place of a model that is loaded."""
    return run_plan(asked, lambda: answers, out, watch)


class Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.total, self.done = 0, 0

    def begin(self, answers: int) -> None:
        self.total = answers

    def advance(self, answers: int) -> None:
        self.done += answers

    def say(self, text: str) -> None:
        self.said.append(text)


def lines(out: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def test_every_question_has_a_line_with_what_it_was_and_came_to(tmp_path: Path) -> None:
    notes = Notes()
    summary = run(plan(), right, tmp_path, notes)
    found = lines(tmp_path)
    per_cell = 5 * 4 + 5  # keys has four questions per example, needle has one
    assert summary == Summary(answers=6 * per_cell, planned=6 * per_cell, new=6 * per_cell, errors=())
    assert (notes.total, notes.done, notes.said) == (6 * per_cell, 6 * per_cell, [])
    assert Counter((line["policy"], line["budget"], line["question"]) for line in found) == {
        (cell.label, cell.budget, cell.question): per_cell for cell in GRID.cells()
    }
    line = next(line for line in found if line["budget"] == 0.25 and line["question"] == "before")
    assert line["text"] == "snapkv:budget=0.25"
    assert (line["task"], line["length"], line["meta"]) == ("demo/keys", 1024, {"length": 1024})
    assert (line["prediction"], line["scores"]) == (line["answers"][0], {"exact_match": 1.0})
    assert (line["tokens"], line["prompt_tokens"], line["compressed_tokens"]) == ([1], 1024, 1023)
    assert (line["kept"], line["kv_bytes"], line["kv_bytes_end"], line["cut"]) == ([1.5, 2.0], 10, 20, 0)
    assert (line["seed"], line["versions"]["jax"]) == (0, jax.__version__)
    after = next(line for line in found if line["question"] == "after")
    assert after["compressed_tokens"] < after["prompt_tokens"] - 1
    assert after["tokens"] == [after["prompt_tokens"] - after["compressed_tokens"]]
    took = lines(tmp_path, "timings.jsonl")
    assert sum(line["answers"] for line in took) == len(found)
    assert all(line["read_seconds"] == 0.1 and line["rows"] == 4 for line in took)
    assert not {"ended", "read_seconds"} & set(line)


def test_a_finished_run_asks_nothing_again(tmp_path: Path) -> None:
    run(plan(), right, tmp_path)
    before = (tmp_path / "results.jsonl").read_bytes()

    def never(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        raise AssertionError("asked again")

    assert run(plan(), never, tmp_path).new == 0
    assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("cut", [1, 40, 2000])
def test_a_corrupt_end_is_repaired(tmp_path: Path, cut: int) -> None:
    run(plan(), right, tmp_path / "whole")
    run(plan(), right, tmp_path / "cut")
    path = tmp_path / "cut" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    notes = Notes()
    summary = run(plan(), right, tmp_path / "cut", notes)
    assert len(notes.said) == 1
    assert notes.said[0].endswith("; its question is asked again")
    assert ": it is incomplete" in notes.said[0]
    assert 0 < summary.new < summary.planned
    assert path.read_bytes() == (tmp_path / "whole" / "results.jsonl").read_bytes()


def test_a_larger_grid_goes_on_from_a_smaller_one(tmp_path: Path) -> None:
    small = GRID.but(policies=["snapkv:budget={budget}"], budgets=[0.25])
    first = run(plan(small), right, tmp_path)
    second = run(plan(), right, tmp_path)
    assert second.new == second.planned - first.planned
    run(plan(), right, tmp_path / "at_once")
    assert (tmp_path / "results.jsonl").read_bytes() == (tmp_path / "at_once" / "results.jsonl").read_bytes()
    again = run(plan(small), right, tmp_path)  # a smaller grid loses no lines
    assert (again.new, len(lines(tmp_path))) == (0, second.planned)


def test_results_of_another_seed_are_not_mixed(tmp_path: Path) -> None:
    run(plan(), right, tmp_path)
    with pytest.raises(ValueError, match=r"seed=1, but .* holds results with seed=0: expected the same value"):
        run(plan(GRID.but(seed=1)), right, tmp_path)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    ready = plan(GRID.but(policies=["full"]))

    def second(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        run(ready, right, tmp_path)

    summary = run(ready, second, tmp_path)
    assert summary.answers == 0
    assert all("another run is writing" in error for error in summary.errors)


def fails(hit: Callable[[ReadingBatch], bool], error: BaseException) -> Callable[[ReadingBatch, Sequence[Policy]], Any]:
    def ask(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        if hit(batch):
            raise error
        return right(batch, policies)

    return ask


def test_what_fails_on_one_example_is_reported_and_the_rest_answered(tmp_path: Path) -> None:
    def unlucky(batch: ReadingBatch) -> bool:
        return any(ask.item.example.id == "1024-3" for reading in batch.readings for ask in reading.asks)

    summary = run(plan(), fails(unlucky, RuntimeError("the policy is at a loss")), tmp_path)
    wrong = [line for line in lines(tmp_path) if "error" in line]
    assert {(line["task"], line["id"]) for line in wrong} == {("demo/keys", "1024-3"), ("demo/needle", "1024-3")}
    assert all(line["error"] == "RuntimeError: the policy is at a loss" and "scores" not in line for line in wrong)
    assert len(wrong) == summary.planned - summary.answers == len(summary.errors) == 6 * 5
    assert summary.errors[0].startswith("full after demo/keys 1024 1024-3: RuntimeError")
    again = run(plan(), right, tmp_path)  # what failed is tried again
    assert (again.new, again.errors) == (30, ())
    run(plan(), right, tmp_path / "well")
    assert (tmp_path / "results.jsonl").read_bytes() == (tmp_path / "well" / "results.jsonl").read_bytes()


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")]
)
def test_out_of_memory_halves_the_batch(tmp_path: Path, error: BaseException) -> None:
    rows: list[int] = []

    def too_many(batch: ReadingBatch) -> bool:
        rows.append(batch.rows)
        return batch.rows > 2

    notes = Notes()
    summary = run(plan(), fails(too_many, error), tmp_path / "small", notes)
    assert summary.errors == ()
    assert notes.said[:3] == [
        "full: out of memory with the caches of 3 policies and budgets; the run continues with 2",
        "full: out of memory with the caches of 2 policies and budgets; the run continues with 1",
        "full: out of memory with 4 prompts; the run continues with 2",
    ]
    assert len(notes.said) == 3 * len(plan().sweeps) == rows.count(4)  # not once per batch
    run(plan(), right, tmp_path / "large")
    assert (tmp_path / "small" / "results.jsonl").read_bytes() == (tmp_path / "large" / "results.jsonl").read_bytes()
    hopeless = run(plan(), fails(lambda _: True, error), tmp_path / "none")
    assert hopeless.answers == 0
    assert len(hopeless.errors) == hopeless.planned


def test_too_many_caches_are_fewer_in_all_later_batches(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        asked.append(len(policies))
        if len(policies) > 2:
            raise MemoryError
        return right(batch, policies)

    assert run(plan(), ask, tmp_path).errors == ()
    sweeps = plan().sweeps
    assert Counter(asked) == {size: sum(len(sweep.batches) for sweep in sweeps) for size in (1, 2)} | {3: len(sweeps)}


@pytest.mark.long
def test_policies_share_prefills_as_far_as_they_can() -> None:
    def shared(question: str = "before", **changes: Any) -> list[list[str]]:
        sweeps = plan(GRID.but(**changes)).sweeps
        return [[cell.policy for cell in sweep.cells] for sweep in sweeps if sweep.cells[0].question == question]

    policies = ["full", "snapkv:budget={budget}", "kvcompose:budget={budget}", "quantize:policy=full"]
    budgets = {name: [f"{name}:budget={budget}" for budget in (0.5, 0.25)] for name in ("snapkv", "kvcompose")}
    # KVCompose repeats the prompt, so that each question is read with its context
    assert shared(policies=policies) == [["full", *budgets["snapkv"]], budgets["kvcompose"], ["quantize:policy=full"]]
    assert shared("after", policies=policies) == [
        ["full", *budgets["snapkv"], *budgets["kvcompose"]],
        ["quantize:policy=full"],
    ]
    many = [f"knorm:budget=0.9,recent={n}" for n in range(40)]
    groups = shared(policies=many)
    assert [policy for group in groups for policy in group] == many
    assert 1 < len(groups) < 5
    assert shared(policies=many, memory_gb=100.0) == [many]
    one = max(plan(GRID).batch_bytes(batch, [parse(many[0])]) for batch in plan(GRID).sweeps[0].batches)
    assert max(map(len, shared(policies=many, memory_gb=2 * one / 1e9))) < 6
    assert len(shared(policies=many, decode_rows=64)) > len(groups)  # answers together take more memory


def test_one_budget_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """It fails together with the others, fails again on its own, and is on its own in all later batches."""
    together: list[int] = []

    def ask(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        together.append(len(policies) > 1 and parse("snapkv:budget=0.25") in policies)
        for policy, found in zip(policies, right(batch, policies), strict=True):
            if policy == parse("snapkv:budget=0.25"):
                raise RuntimeError("too small")
            yield found

    summary = run(plan(), ask, tmp_path)
    wrong = [line for line in lines(tmp_path) if "error" in line]
    assert {(line["policy"], line["budget"]) for line in wrong} == {("snapkv", 0.25)}
    assert 3 * len(wrong) == summary.planned == 3 * (summary.planned - summary.answers)
    assert sum(together) == len(plan().sweeps)


def test_refusals_policies_and_marks_that_fail_are_lines_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metric(prediction: str, question: Any) -> Any:
        if prediction == "dora":
            raise OSError("no judge")
        return {"exact_match": 1.0}

    given: list[Example | Fault] = [
        Fault("bad", "data.jsonl, line 3: no field 'context'"),
        words.example("good", "adam alan", " what is adam :"),
        words.example("judged", "adam alan", " what is alan :", answer="dora"),
    ]
    grid = Grid.of({"tasks": ["test/*", "none/*"], "policies": ["full", "adakv:base=h2o,base.budget=40,groups=3"]})
    summary = run(plan(grid, words.items(monkeypatch, grid, tokenizer(), given, metric=metric)), right, tmp_path)
    found = lines(tmp_path)
    assert [line["error"].split(": expected")[0] for line in found if "error" in line] == [
        "data.jsonl, line 3: no field 'context'",
        next(line["error"] for line in found if line["task"] == "none/*").split(": expected")[0],
        "groups=3 of 2 kv heads",
        "the answer could not be marked: OSError: no judge",
    ]
    assert [line["id"] for line in found if "scores" in line] == ["good"]
    assert (summary.answers, summary.planned, len(summary.errors)) == (1, 2, 4)


def test_a_run_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    run(plan(), right, tmp_path)
    header = (tmp_path / "run.json").read_bytes()
    with (
        Records(tmp_path / "results.jsonl", pytest.fail),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        run(plan(GRID.but(limit=1).limited(1)), right, tmp_path)
    assert (tmp_path / "run.json").read_bytes() == header


def test_results_that_are_not_of_a_run_stay(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"holds results\.jsonl without run\.json"):
        run(plan(), right, tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == "mine\n"
