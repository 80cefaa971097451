"""Tasks of questions of one's own: a file with a JSON object per line, or a list of such objects."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.checks import did_you_mean, shown
from kvjax.evaluation import scorers
from kvjax.files.reading import read_bytes

from .registry import TASKS
from .task import DataError, Example, Metric, Question, Source, Task

BETWEEN = "\n\n"  # context and question
NAME = "questions"  # the task of questions that state none
MOST_NEW = 2**24  # tokens of an answer
BRIEF = 60  # characters of a value in a message


@dataclass(frozen=True)
class OwnTask(Task):
    """A task with the given examples.

    Attributes:
        given: the examples.
        facts: what answers to the task depend on: the file and its checksum, the scorer, and the length of an answer.
    """

    shown: bool = True
    given: tuple[Example, ...] = ()
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def fixed(self) -> Mapping[str, Any]:
        return dict(self.facts)

    def examples(self, source: Source) -> Iterator[Example]:
        yield from self.given


@dataclass(frozen=True)
class _Asked:
    """A line: a question about a context."""

    task: str
    context: str
    new_tokens: int | None
    question: Question


def read_tasks(path: str | os.PathLike[str], scorer: Metric, new_tokens: int) -> tuple[OwnTask, ...]:
    """The tasks of a file of JSON objects, one per line. Blank lines are skipped.

    Args:
        path: the file, in UTF-8.
        scorer: marks the answers.
        new_tokens: the largest number of tokens of an answer, for lines that do not state it.

    Raises:
        DataError: the file cannot be read, or a line is wrong. The message names the line.
    """
    try:
        data = read_bytes(path, expected="a JSONL file")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a JSONL file") from None
    except ValueError as error:
        raise DataError(str(error)) from None
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    given = [(i, f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise DataError(f"{path} has no line: expected a JSON object per line")
    facts = {"file": str(path), "sha256": hashlib.sha256(data).hexdigest()}
    asked = [_asked(i, where, _object(where, line), Path(path).stem, scorer) for i, where, line in given]
    return _tasks(asked, scorer, new_tokens, facts)


def tasks_of(questions: Sequence[Mapping[str, Any]], scorer: Metric, new_tokens: int) -> tuple[OwnTask, ...]:
    """The tasks of a list of mappings, as `read_tasks` makes those of a file. Raises DataError.

    Args:
        questions: the lines.
        scorer: marks the answers.
        new_tokens: the largest number of tokens of an answer, for lines that do not state it.
    """
    asked = []
    for i, fields in enumerate(questions, 1):
        if not isinstance(fields, Mapping):
            raise DataError(f"{NAME}, line {i}: {shown(fields, BRIEF)}: expected a mapping with the fields {_FIELDS}")
        asked.append(_asked(i, f"{NAME}, line {i}", fields, NAME, scorer))
    digest = hashlib.sha256(repr(asked).encode()).hexdigest()
    return _tasks(asked, scorer, new_tokens, {"file": None, "sha256": digest})


def _tasks(asked: Iterable[_Asked], scorer: Metric, new_tokens: int, facts: dict[str, Any]) -> tuple[OwnTask, ...]:
    """Questions about one context become one example, so that the context is prefilled once for all of them."""
    by_task: dict[str, dict[tuple[str, int | None], list[Question]]] = {}
    for one in asked:
        by_task.setdefault(one.task, {}).setdefault((one.context, one.new_tokens), []).append(one.question)
    facts |= {"scorer": getattr(scorer, "name", ""), "max_new_tokens": new_tokens}
    return tuple(
        OwnTask(
            name,
            new_tokens,
            scorer,
            given=tuple(
                Example(f"line {questions[0].meta['line']}", context, tuple(questions), new_tokens=own)
                for (context, own), questions in contexts.items()
            ),
            facts=tuple(facts.items()),
        )
        for name, contexts in by_task.items()
    )


def _object(where: str, line: bytes) -> Mapping[str, Any]:
    """The JSON object of a line."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"it has {shown(name, BRIEF)} twice")
            found[name] = value
        return found

    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}; expected a JSON object in UTF-8") from None
    except (ValueError, RecursionError) as error:
        text = shown(line.decode("utf-8"), BRIEF)
        raise DataError(f"{where}: {text} is no JSON ({error}); expected a JSON object") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: {shown(value, BRIEF)}: expected a JSON object with the fields {_FIELDS}")
    return value


def _asked(number: int, where: str, fields: Mapping[str, Any], name: str, scorer: Metric) -> _Asked:
    """The question of a line. Raises DataError, which names the line and the field."""
    if unknown := [field for field in fields if field not in _READERS]:
        near = did_you_mean(unknown[0], _READERS)
        raise DataError(f"{where}: {shown(unknown[0], BRIEF)} is an unknown field: expected {_FIELDS}{near}")
    if missing := [field for field in _NEEDED if field not in fields]:
        raise DataError(f"{where}: {missing[0]} is missing: expected the fields {_FIELDS}")
    read: dict[str, Any] = {}
    for field, value in fields.items():
        try:
            read[field] = _READERS[field](value)
        except ValueError as error:
            raise DataError(f"{where}: {field}={shown(value, BRIEF)}: expected {error}") from None
    task = read.get("task", name)
    if task in TASKS:
        raise DataError(f"{where}: task={shown(task)} is the name of another task: expected a name of its own")
    rouge = getattr(scorer, "function", None) is scorers.rouge
    if rouge and not any(re.search("[a-z0-9]", text.lower()) for text in read["answers"]):
        raise DataError(
            f"{where}: answers={shown(fields['answers'], BRIEF)}: the scorer rouge reads Latin letters and digits "
            "alone; expected one of them, or another scorer"
        )
    question = Question(BETWEEN + read["question"], read["answers"], meta={"line": number})
    return _Asked(task, read["context"], read.get("max_new_tokens"), question)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not blank")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a text without lone surrogates") from None
    return value


def _answers(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else [value]
    try:
        if texts:
            return tuple(map(_text, texts))
    except ValueError:
        pass
    raise ValueError("a text, or a list of at least one, none of which is blank")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_NEW:
        raise ValueError(f"an integer in 1 .. {MOST_NEW:,}")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "context": _text,
    "question": _text,
    "answers": _answers,
    "task": _text,
    "max_new_tokens": _count,
}
_NEEDED = ("context", "question", "answers")
_FIELDS = "context, question and answers, and optionally task and max_new_tokens"
