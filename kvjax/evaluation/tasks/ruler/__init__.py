"""RULER (arXiv 2404.06654): thirteen tasks at any length, with the prompts and settings of NVIDIA/RULER (Apache-2.0).

A length counts the prompt and the generated tokens, without special tokens. The generators follow RULER, but kvjax has
its own random draws: an example depends only on the seed, the task, the length and the index of the example.

RULER hides the needles of all prompts of a length in the same text, the beginning of the essays. The five tasks
`ruler_varied/*` are those with essays, but each prompt's text begins at another sentence.
"""

from __future__ import annotations

from dataclasses import replace

from ...metrics import contained_all, contained_any, printable
from ..task import Question, Scores
from .needles import Needles
from .questions import DocumentQuestions
from .text import RulerTask
from .variables import VariableTracking
from .words import CommonWords, FrequentWords


def all_of(prediction: str, question: Question) -> Scores:
    """RULER's string_match_all: the share of the references that the answer contains, ignoring case."""
    return {"string_match": contained_all(printable(prediction), question.answers)}


def part_of(prediction: str, question: Question) -> Scores:
    """RULER's string_match_part: 1 if the answer contains any of the references, ignoring case."""
    return {"string_match": contained_any(printable(prediction), question.answers)}


_single = Needles("ruler/niah_single_1", 128, all_of, shown=True, haystack="noise")
_essays = replace(_single, haystack="beginning", shown=False)

_THIRTEEN: tuple[RulerTask, ...] = (
    _single,
    replace(_essays, name="ruler/niah_single_2"),
    replace(_essays, name="ruler/niah_single_3", values="uuids"),
    replace(_essays, name="ruler/niah_multikey_1", keys_hidden=4),
    replace(_single, name="ruler/niah_multikey_2", haystack="needle"),
    replace(_single, name="ruler/niah_multikey_3", haystack="needle", keys="uuids", values="uuids"),
    replace(_essays, name="ruler/niah_multivalue", values_of_each=4),
    replace(_essays, name="ruler/niah_multiquery", keys_hidden=4, keys_asked=4),
    VariableTracking("ruler/vt", 30, all_of, shown=True),
    CommonWords("ruler/cwe", 120, all_of, shown=True),
    FrequentWords("ruler/fwe", 50, all_of, shown=True),
    DocumentQuestions("ruler/qa_1", 32, part_of, data="squad"),
    DocumentQuestions("ruler/qa_2", 32, part_of, data="hotpotqa"),
)

_varied = tuple(
    replace(task, name=f"ruler_varied/{task.name.split('/')[1]}", haystack="anywhere")
    for task in _THIRTEEN
    if isinstance(task, Needles) and task.haystack == "beginning"
)
TASKS = _THIRTEEN + _varied
