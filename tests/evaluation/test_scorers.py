"""Answers to questions of one's own are marked as expected, and functions that do not mark are named."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.evaluation.scorers import scorer
from kvjax.evaluation.tasks.task import Question


def question(*answers: str) -> Question:
    return Question("who ?", answers, meta={"line": 7})


@pytest.mark.parametrize(
    ("name", "answer", "answers", "score"),
    [
        ("exact", " New\nYork. ", ["Boston", "new york"], 1),
        ("exact", "the lamp", ["lamp"], 0),
        ("exact", "", ["A"], 0),
        ("exact", "5", ["-5"], 0),
        ("exact", "北京。", ["北京"], 1),
        ("f1", "北京。", ["北京"], 1),
        ("contains", "It is New York.", ["Boston", "new york"], 1),
        ("contains", "It is New  York.", ["new york"], 0),
        ("f1", "The big lamp!", ["boat", "a lamp"], 2 / 3),  # "big lamp" and "lamp"
        ("f1", "A", ["A"], 1),  # an article, of which SQuAD's normal form leaves nothing
        ("f1", "", ["A"], 0),
        ("rouge", "police shot and killed gunman", ["a dog", "police killed the gunman"], 2 / 3),  # 3 of 5, 3 of 4
    ],
)
def test_scores_by_hand(name: str, answer: str, answers: list[str], score: float) -> None:
    if name == "rouge":
        pytest.importorskip("rouge_score", reason="ROUGE needs rouge-score (the extra `eval`)")
    assert scorer(name)(answer, question(*answers)) == {name: pytest.approx(score)}


def test_a_function_of_a_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scorer_of_mine.py").write_text(
        "import sys\ndef length(answer, answers):\n    return len(answer) / 10 if answers == ['x', 'y'] else 2\n"
        "number = 3\ndef three(a, b, c):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert scorer("scorer_of_mine:length")("abc", question("x", "y")) == {"scorer_of_mine:length": 0.3}
    for given, message in {
        "scorer_of_mine:nothing": "AttributeError: module 'scorer_of_mine' has no attribute 'nothing'; expected a func",
        "scorer_of_mine:number": "is of type int: expected a function .answer, expected answers. -> number",
        "scorer_of_mine:three": "missing a required argument: 'c'; expected a function",
        "no_such_module:f": "ModuleNotFoundError: No module named 'no_such_module'; expected a function of a module",
        "exat": r"scorer 'exat': expected exact, contains, f1, rouge, or module:function; did you mean exact\?",
        "x:": "scorer 'x:': expected exact, contains",
    }.items():
        with pytest.raises(ValueError, match=message):
            scorer(given)


def fails(answer: str, answers: list[str]) -> float:
    raise KeyError(answer)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b: math.nan, "it gives nan; expected a number in"),
        (lambda a, b: 1.01, "it gives 1.01; expected"),
        (lambda a, b: -1, "it gives -1; expected"),
        (lambda a, b: "1", "it gives '1'; expected"),
        (lambda a, b: None, "it gives None; expected"),
        (fails, "the scorer fails, on the answer to line 7: KeyError: 'abc'"),
    ],
)
def test_a_function_that_gives_no_score(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        scorer(function)("abc", question("x"))
    assert "line 7" in str(found.value)


@pytest.mark.parametrize("value", [True, 1, 0.0, np.float32(0.5), np.bool_(True)])
def test_numbers_that_are_scores(value: Any) -> None:
    (score,) = scorer(lambda answer, answers: value)("abc", question("x")).values()
    assert (type(score), score) == (float, value)


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    monkeypatch.setattr("kvjax.evaluation.metrics._scorer", lambda: _missing())
    with pytest.raises(ValueError, match=r"scorer 'rouge': this metric needs rouge-score: expected pip install"):
        scorer("rouge")


def _missing() -> Any:
    from kvjax.evaluation.metrics import _library

    return _library("rouge_score.rouge_scorer")
