"""Marks the answers to questions of one's own: by a metric's name, or by a Python function."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvjax.checks import did_you_mean, shown
from kvjax.evaluation import metrics
from kvjax.evaluation.tasks.task import Question, Scores

Function: TypeAlias = Callable[[str, list[str]], float]
"""Maps (answer, expected answers) to a score in [0, 1]."""


def exact(answer: str, answers: Sequence[str]) -> float:
    """1 if the answer equals an expected one, up to case, spaces and a full stop at the end, "." or "。"."""
    return float(_plain(answer) in map(_plain, answers))


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(" .。")


def f1(answer: str, answers: Sequence[str]) -> float:
    """The largest F1 of words in SQuAD's normal form, and 1 if `exact` is: nothing is left of "A" in that form."""
    return max(exact(answer, answers), *(metrics.qa_f1(answer, expected) for expected in answers))


def rouge(answer: str, answers: Sequence[str]) -> float:
    """The largest ROUGE-L F1 over the expected answers, as SCROLLS defines it. Needs the extra `eval`.

    Its words are Latin letters and digits. `own.read_tasks` refuses answers without any, which would always score 0.
    """
    return metrics.rouge(answer, answers)["rougeL"]


SCORERS: dict[str, Function] = {"exact": exact, "contains": metrics.contained_any, "f1": f1, "rouge": rouge}


@dataclass(frozen=True)
class Scorer:
    """A metric of a task: the score that a function gives, under its name.

    Attributes:
        name: the name of the score.
        function: the function.
    """

    name: str
    function: Function

    def __call__(self, answer: str, question: Question) -> Scores:
        """The score. Raises ValueError, which names the line, if the function fails or gives no number in [0, 1]."""
        place = f"the scorer {self.name}, on the answer to line {question.meta['line']}"
        try:
            value: Any = self.function(answer, list(question.answers))
        except Exception as error:  # a function of the user's may raise anything
            raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
        number = isinstance(value, Real | np.bool_)
        if not number or math.isnan(value) or not 0 <= value <= 1:
            raise ValueError(f"{place}: it gives {shown(value)}; expected a number in [0, 1]")
        return {self.name: float(value)}


def scorer(given: str | Function) -> Scorer:
    """The scorer of a name, "module:function", or a function (answer, expected answers) -> score in [0, 1].

    A module may lie in the working directory.

    Raises:
        ValueError: there is no such scorer, it does not take two arguments, or its module or a package that it needs
            cannot be imported.
    """
    if not isinstance(given, str):
        return Scorer(getattr(given, "__name__", type(given).__name__), _checked(given, shown(given)))
    if given in SCORERS:
        try:
            SCORERS[given]("a", ["a"])  # what it needs is missing now, or never
        except ImportError as error:
            raise ValueError(f"scorer {shown(given)}: {error}") from None
        return Scorer(given, SCORERS[given])
    module, colon, name = given.partition(":")
    if not colon or not module or not name:
        accepted = f"{', '.join(SCORERS)}, or module:function"
        raise ValueError(f"scorer {shown(given)}: expected {accepted}{did_you_mean(given, SCORERS)}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # the module is a program
        raise ValueError(
            f"scorer {shown(given)}: {type(error).__name__}: {error}; expected a function of a module that is "
            "installed or in the working directory"
        ) from error
    return Scorer(given, _checked(found, shown(given)))


def _checked(function: Any, name: str) -> Function:
    accepted = "expected a function (answer, expected answers) -> number in [0, 1]"
    if not callable(function):
        raise ValueError(f"scorer {name} is of type {type(function).__name__}: {accepted}")
    try:
        inspect.signature(function).bind("", [""])
    except TypeError as error:
        raise ValueError(f"scorer {name}: {error}; {accepted}") from None
    except ValueError:  # of a built-in function, whose arguments nobody knows
        pass
    return function
