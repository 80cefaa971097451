"""Runs from Python, on the model that ships with kvjax: own policies, own questions, and the same results as a grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.evaluation import rows, run
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.report.results import read_results
from kvjax.evaluation.scorers import scorer
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.own import OwnTask, tasks_of
from kvjax.evaluation.tasks.task import Scores
from kvjax.parts import Fixed, Moment, Needs, Slots
from tests.evaluation.test_runner import right

TEXTS = [
    f"the code of {name} is {thing} . the lion crosses the river . the code of maria is harp ."
    for name, thing in (("adam", "lamp"), ("alan", "sword"), ("alice", "kite"), ("amir", "drum"))
]
QUESTIONS = [
    {"context": text, "question": "recall what the code of maria is :", "answers": "maria is harp"} for text in TEXTS
]


@dataclass(frozen=True)
class FirstTokens(kvjax.Score):
    """The oldest tokens, which no registry knows."""

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True)

    def __call__(self, entries: Slots, moment: Moment) -> Any:
        return -entries.positions.astype(jnp.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return kvjax.load("demo")


@pytest.mark.long
def test_a_policy_and_questions_of_ones_own(model: Any, tmp_path: Path) -> None:
    mine = kvjax.Policy(FirstTokens(), Fixed(8))
    results = run(model, {"full": "full", "mine": mine}, QUESTIONS, tmp_path / "out", score="exact", max_new_tokens=8)
    found = list(rows(results))
    assert [(row["policy"], row["task"], row["line"]) for row in found] == [
        (policy, "questions", line) for policy in ("full", "mine") for line in (1, 2, 3, 4)
    ]
    assert {row["score"] for row in found[:4]} == {1.0}
    assert {row["kept_tokens"] for row in found[4:]} == {8.0}
    assert {row["policy_text"] for row in found} == {"full", repr(mine)}
    assert {row["question"] for row in found} == {"recall what the code of maria is :"}

    again = run(model, {"full": kvjax.policies.full()}, QUESTIONS, tmp_path / "out", score="exact", max_new_tokens=8)
    assert [row["policy"] for row in rows(again)] == ["full"] * 4 + ["mine"] * 4
    with pytest.raises(ValueError, match="holds answers to other questions of the task 'questions'"):
        run(model, ["full"], QUESTIONS[:2], tmp_path / "out", score="exact", max_new_tokens=8)


@pytest.mark.long
def test_a_file_by_its_model_is_what_the_grid_of_a_command_gives(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in QUESTIONS))
    tasks = [str(file), {"name": "demo/needle", "lengths": 64}]
    options: dict[str, Any] = {"score": "exact", "max_new_tokens": 8, "limit": 2, "question": "before"}
    one, other = (run(which, ["full", "h2o:budget=0.5"], tasks, **options) for which in ("demo", model))
    plain = [[{**row, "model": None, "seconds": None} for row in rows(found)] for found in (one, other)]
    assert plain[0] == plain[1]
    assert [column[0] for column in one.columns] == ["demo/needle", "mine"]
    assert one.settings == ("before",)


@pytest.mark.long
def test_a_task_of_a_registry(model: Any, tmp_path: Path) -> None:
    (task,) = registry.find("demo/needle")
    with pytest.warns(
        UserWarning, match="demo/needle: length=None of the generated task demo/needle: expected a length"
    ):
        results = run(model, ["full"], [task, QUESTIONS[0]], tmp_path)
    assert results.columns == (("questions", None),)
    assert read_results([tmp_path])[0].columns == results.columns


def test_a_task_combines_its_own_scores(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Worst(OwnTask):
        def overall(self, scores: Sequence[Scores]) -> dict[str, float]:
            return {"worst": min(one["line"] for one in scores)}

    (asked,) = tasks_of(QUESTIONS, scorer("exact"), 8)
    task = Worst("worst", 8, lambda _, question: {"line": question.meta["line"]}, given=asked.given)
    monkeypatch.setattr(Asker, "of", lambda *_: right)
    results = run(model, ["full"], task)
    assert [cell.scores(results.columns[0]) for cell in results.cells.values()] == [{"worst": 1}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 5}, "model is of type int: expected a path, or the decoder and the tokenizer of kvjax.load"),
        ({"tasks": None}, r"tasks=None: expected names, files \*.jsonl, tasks, or questions"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected an integer in 1 .. 2147483647"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8': expected an integer in 1 .. 2147483647"),
        ({"model": ("a", "b")}, r"model=\('a', 'b'\): expected a path, or the decoder and the tokenizer of kvjax.load"),
        ({"dtype": "float32"}, "dtype='float32' of a model that is loaded: expected it to be left out"),
        ({"tasks": [5]}, r"tasks has 5: expected names, files \*.jsonl, tasks, or questions"),
        ({"tasks": [{"context": "a"}]}, "questions, line 1: question is missing: expected the fields context"),
        ({"tasks": []}, "tasks is missing: expected a list of at least one entry"),
        ({"tasks": "nowhere.jsonl"}, "nowhere.jsonl: No such file or directory; expected a JSONL file"),
        ({"policies": ["h2o:budgt=3"]}, "h2o has no option 'budgt'"),
        ({"policies": []}, "policies is missing"),
        ({"policies": {"a": 5}}, "policy: 5: expected a string"),
        ({"score": "f2"}, "scorer 'f2': expected exact"),
        ({"limt": 3}, "limt: unknown field of a run; .*; did you mean limit"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str, model: Any) -> None:
    with pytest.raises(ValueError, match=message):
        run(**{"model": model, "policies": ["full"], "tasks": QUESTIONS} | given)


def test_rows_are_those_of_results() -> None:
    folder: Any = "runs/demo"
    with pytest.raises(ValueError, match="results is of type str: expected a Results"):
        next(rows(folder))
