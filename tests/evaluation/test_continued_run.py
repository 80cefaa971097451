"""A run that goes on in a folder keeps answers of the same policies only, and forgets refusals that are over."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.report.results import read_results
from kvjax.evaluation.runner import Summary
from kvjax.evaluation.runner import run as run_plan
from kvjax.evaluation.sweeping import Answering
from kvjax.evaluation.tasks.vocabulary import tokenizer
from kvjax.policies import snapkv
from tests.evaluation.test_runner import GRID, lines, plan, right, run

SMALL = GRID.but(question="after", budgets=[0.5])
NAMED = {"name": "mine", "policy": "snapkv:budget={budget},window=32"}


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (NAMED, NAMED | {"policy": "snapkv:budget={budget},window=64"}),
        (
            {"name": "mine", "policy": "scissorhands:budget={entries}", "tokens": 900},
            {"name": "mine", "policy": "scissorhands:budget={entries}", "tokens": 1000},
        ),
        ({"name": "mine", "policy": snapkv(budget=64)}, {"name": "mine", "policy": snapkv(budget=65)}),
    ],
)
def test_another_policy_of_the_same_name_is_refused(tmp_path: Path, earlier: Any, later: Any) -> None:
    run(plan(SMALL.but(policies=["full", earlier])), right, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"the policy mine.* is .*, but .* holds answers of .* another name or anoth"):
        run(plan(SMALL.but(policies=["full", later])), right, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    renamed = {"name": "other", "policy": later["policy"], "tokens": later.get("tokens")}
    assert run(plan(SMALL.but(policies=["full", renamed])), right, tmp_path).new == 25


def test_another_text_of_the_same_policy_goes_on(tmp_path: Path) -> None:
    run(plan(SMALL.but(policies=[NAMED])), right, tmp_path)
    same = NAMED | {"policy": "snapkv: window=32, budget={budget}"}
    assert run(plan(SMALL.but(policies=[same])), right, tmp_path).new == 0


def test_other_gates_are_refused_where_a_policy_reads_them(tmp_path: Path) -> None:
    grid = SMALL.but(policies=["full", "kvzap:budget={budget}"], gates=["gates/first"])
    run(plan(grid), right, tmp_path)
    assert run(plan(grid), right, tmp_path).new == 0
    with pytest.raises(ValueError, match=r"gates=\['gates/second'\], but .* holds answers of kvzap at 0.5 with gates="):
        run(plan(grid.but(gates=["gates/second"])), right, tmp_path)
    others = grid.but(gates=["gates/second"], policies=["full", "snapkv:budget={budget}"])
    assert run(plan(others), right, tmp_path).new == 25


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal("demo/needle", 1024, None, "a file is missing"),
        Refusal("demo/needle", 1024, "1024-0", "the prompt is too long"),
        Refusal("rular/*", None, None, "no task matches"),
    ],
)
def test_a_refusal_that_is_over_is_no_error_of_the_report(tmp_path: Path, refusal: Refusal) -> None:
    found = list(read_items(SMALL, tokenizer(), 4096))
    asked = [one for one in found if getattr(one, "task", None) is not None]
    assert len(run(plan(SMALL, [*asked, refusal]), right, tmp_path).errors) == 1
    assert read_results([tmp_path])[0].errors == 1
    run(plan(SMALL, found), right, tmp_path)
    assert read_results([tmp_path])[0].errors == 0
    run(plan(SMALL, found), right, tmp_path / "at_once")
    assert (tmp_path / "results.jsonl").read_bytes() == (tmp_path / "at_once" / "results.jsonl").read_bytes()


def test_refusals_of_tasks_that_a_run_does_not_ask_stay(tmp_path: Path) -> None:
    refusal = Refusal("ruler/qa_1", 1024, None, "a file is missing")
    found = list(read_items(SMALL, tokenizer(), 4096))
    run(plan(SMALL, [*found, refusal]), right, tmp_path)
    run(plan(SMALL, found), right, tmp_path)
    assert [line["task"] for line in lines(tmp_path) if "error" in line] == ["ruler/qa_1"]


def test_a_cell_that_suits_the_model_now_has_no_error(tmp_path: Path) -> None:
    wrong = {"name": "mine", "policy": "adakv:base=h2o,base.budget=40,groups=3"}
    assert len(run(plan(SMALL.but(policies=["full", wrong])), right, tmp_path).errors) == 1
    run(plan(SMALL.but(policies=["full", wrong | {"policy": "adakv:base=h2o,base.budget=40"}])), right, tmp_path)
    assert not [line for line in lines(tmp_path) if "error" in line]


def test_a_file_system_without_locks_holds_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert run(plan(SMALL), right, tmp_path).errors == ()


@pytest.mark.parametrize("name", ["context", "answers", "text"])
def test_other_questions_under_the_same_ids_are_refused(tmp_path: Path, name: str) -> None:
    found = [item for item in read_items(SMALL, tokenizer(), 4096) if isinstance(item, Item)]
    run(plan(SMALL, found[:2]), right, tmp_path)
    item, (question, *rest) = found[1], found[1].example.questions
    if name == "context":
        other = replace(item, context=item.context[1:])
    else:
        changed = replace(question, **{name: ("another",) if name == "answers" else f"{question.text} ."})
        other = replace(item, example=replace(item.example, questions=(changed, *rest)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"holds answers to another question 0 of '{item.example.id}' of the task"):
        run(plan(SMALL, [found[0], other]), right, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run(plan(SMALL, found[:3]), right, tmp_path).new > 0


def test_the_model_is_loaded_after_the_folder_is_checked_and_if_an_answer_is_missing(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load() -> Answering:
        loaded.append("model")
        return right  # type: ignore[return-value]

    def go(grid: Grid) -> Summary:
        return run_plan(plan(grid), load, tmp_path)

    assert go(SMALL).new > 0
    assert go(SMALL).new == 0
    with pytest.raises(ValueError, match=r"seed=1, but .* holds results with seed=0"):
        go(SMALL.but(seed=1))
    assert len(loaded) == 1
