"""Tokenizes the examples of tasks. A prompt that is too long is cut if its benchmark cuts it, and refused otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from kvjax.checks import shown
from kvjax.evaluation.entries import LINES, TaskLine
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.judge import Endpoint
from kvjax.evaluation.lines import QUESTION
from kvjax.evaluation.scorers import scorer
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.own import read_tasks
from kvjax.evaluation.tasks.task import Example, Fault, Question, Source, Task
from kvjax.request.chat import rendered
from kvjax.request.prompts import encoded

Ids = Int[np.ndarray, "_"]
Found: TypeAlias = tuple[TaskLine, tuple[Task, ...], str | None]  # the tasks of a line, or why it has none

MARK = "\u241e the question follows \u241e"  # separates context and question while a chat template is applied


@dataclass(frozen=True)
class Item:
    """A tokenized context and its questions, each of which is answered independently.

    Attributes:
        task: the task that marks the answers.
        length: the length that the grid requests of a generated task; None for other tasks.
        example: the example before tokenization.
        context: the ids of the context, including the special tokens that begin a text.
        questions: the ids of each question, at least one token each.
        new_tokens: the largest number of tokens of an answer.
        cut: the number of tokens that were removed from the context.
        refilled: whether a row takes the next prompt as soon as its answer has ended, because answers differ in length.
        pieces: of the first example of a task and length, if its prompts may be shown, the texts of the tokens of the
            context and of each question. A run records which of them each policy retains. Empty for other examples.
    """

    task: Task
    length: int | None
    example: Example
    context: Ids
    questions: tuple[Ids, ...]
    new_tokens: int
    cut: int = 0
    refilled: bool = False
    pieces: tuple[tuple[str, ...], ...] = ()

    def asked(self, index: int) -> dict[str, Any]:
        """Returns what a line of the results file records of a question, by `QUESTION`."""
        question = self.example.questions[index]
        size = self.context.size + self.questions[index].size
        return dict(zip(QUESTION, (question.text, list(question.answers), size), strict=True))


@dataclass(frozen=True)
class Refusal:
    """An example or task that cannot be asked. It is reported and has no score.

    Attributes:
        task: the name of the task, or the pattern that matched no task.
        length: the requested length of a generated task.
        id: the id of the example; None if the task as a whole cannot be asked.
        reason: the reason, as an error message.
    """

    task: str
    length: int | None
    id: str | None
    reason: str


def read_items(
    grid: Grid, tokenizer: Any, max_positions: int, only: Sequence[str] | None = None
) -> Iterator[Item | Refusal]:
    """Yields the items and refusals of a grid, in the order of its tasks.

    Args:
        grid: the grid.
        tokenizer: the model's tokenizer.
        max_positions: the number of positions that the model supports. Longer prompts are cut or refused.
        only: names, patterns or files that select some of the grid's tasks; all tasks by default.

    Raises:
        ValueError: if a pattern in `only` matches no task, or none of the grid's, if a file of questions cannot be
            used, if two of them have a task of the same name, if two entries have different limits for one task and
            length, or if there are lengths and no task has any.
    """
    limits: dict[tuple[str, int | None], int | None] = {}
    lines: list[Found] = [(line, *_tasks(line)) for line in grid.tasks]
    own = _own(lines)
    _check_lengths(lines)
    wanted = None
    if only:
        patterns = [name for name in only if not name.endswith(LINES)]
        wanted = {task.name for task in registry.find(patterns, own)}
        _check_selected(patterns, [task.name for _, tasks, _ in lines for task in tasks])
        wanted |= {task.name for line, tasks, _ in lines if line.file in only for task in tasks}
    judge = None if grid.judge is None else Endpoint(**grid.judge)
    for line, tasks, problem in lines:
        if problem is not None:
            yield Refusal(line.name, None, None, problem)
        for task in tasks:
            if wanted is not None and task.name not in wanted:
                continue
            lengths = (line.lengths or (None,)) if task.generated else (None,)
            for length in dict.fromkeys(lengths):
                if (task.name, length) in limits:
                    _check_limit(task.name, length, limits[task.name, length], line.limit)
                    continue
                limits[task.name, length] = line.limit
                asked = task if judge is None else task.judged_by(judge)
                yield from _of_task(grid, line, asked, length, tokenizer, max_positions)


def _check_lengths(lines: Sequence[Found]) -> None:
    """Raises ValueError for lengths that no task reads."""
    given = next((line.lengths for line, *_ in lines if line.lengths), ())
    if given and not any(problem or any(task.generated for task in tasks) for _, tasks, problem in lines):
        raise ValueError(
            f"lengths={shown(list(given))}, but all tasks are read from files: expected a generated task too, such as "
            "ruler/vt, or no lengths; max_length limits the tokens of a prompt"
        )


def _check_limit(name: str, length: int | None, first: int | None, limit: int | None) -> None:
    """Raises ValueError if two entries of a grid ask a task with different limits."""
    if limit != first:
        where = name if length is None else f"{name} at {length:,} tokens"
        raise ValueError(
            f"tasks: {where} occurs with limit={first} and limit={limit}: expected one entry, or one limit"
        )


def _check_selected(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raises ValueError for a pattern that selects no task of the grid."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"no task of the grid matches {shown(pattern)}: expected some of {', '.join(dict.fromkeys(names))}, "
                "or a grid with other tasks (--config)"
            )


def _tasks(line: TaskLine) -> tuple[tuple[Task, ...], str | None]:
    """The tasks of a line; if there are none of its name, why. Raises ValueError for a file that cannot be used."""
    if line.task is not None:
        return (line.task,), None
    if line.file is not None:
        return read_tasks(line.file, scorer(line.scorer), line.max_new_tokens), None
    try:
        return registry.find(line.name), None
    except ValueError as error:
        return (), str(error)


def _own(lines: Sequence[Found]) -> dict[str, Task]:
    """The tasks that are in no registry, by name."""
    found: dict[str, Task] = {}
    for line, tasks, _ in lines:
        for task in tasks if line.task is not None or line.file is not None else ():
            if found.setdefault(task.name, task) != task:
                raise ValueError(
                    f"the task {shown(task.name)} of {line.file or 'the given tasks'} has the name of another task: "
                    "expected other names in the field task, or another name of the file"
                )
    return found


def _of_task(
    grid: Grid, line: TaskLine, task: Task, length: int | None, tokenizer: Any, max_positions: int
) -> Iterator[Item | Refusal]:
    limit = line.limit or grid.limit
    folder = None if grid.data is None else Path(grid.data)
    source = Source(tokenizer, length, grid.seed, folder=folder, **({} if limit is None else {"count": limit}))
    seen: set[str] = set()
    count = -1
    try:
        for count, example in enumerate(task.examples(source)):
            if count == limit:
                break
            if example.id in seen:
                yield Refusal(task.name, length, example.id, "another example of this task has the same id")
                continue
            seen.add(example.id)
            if isinstance(example, Fault):
                yield Refusal(task.name, length, example.id, example.reason)
                continue
            try:
                item = tokenized(example, task, length, grid, tokenizer, max_positions)
                if count == 0 and task.shown:
                    texts = (_texts(ids, tokenizer) for ids in (item.context, *item.questions))
                    item = replace(item, pieces=tuple(texts))
                yield item
            except ValueError as error:
                yield Refusal(task.name, length, example.id, str(error))
        if count < 0:
            yield Refusal(
                task.name, length, None, "the task has no example, as of an empty file: expected at least one"
            )
    except (ValueError, OSError, ImportError) as error:
        yield Refusal(task.name, length, None, str(error))


def tokenized(example: Example, task: Task, length: int | None, grid: Grid, tokenizer: Any, max_positions: int) -> Item:
    """Tokenizes an example. Context and questions are tokenized separately, so both settings have the same tokens.

    Raises:
        ValueError: if the context or a question is empty, if the prompt is too long and must not be cut, if the grid
            requests a chat template that the tokenizer lacks, or if the results file cannot have what it records.
    """
    _check_recorded(example)
    chat = grid.chat and task.chat
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: true, but the model's tokenizer has no chat template; expected chat: false")

    def encode(text: str, *, begins: bool = False) -> Ids:
        return encoded(text, tokenizer, begins=begins, written=chat).astype(np.int32)

    if chat:
        parts = [_in_template(example.context, question, tokenizer) for question in example.questions]
        context, texts = parts[0][0], [after for _, after in parts]
    else:
        context, texts = example.context, [question.text for question in example.questions]
    ids = encode(context, begins=True)
    questions = [encode(text) for text in texts]
    if not example.context.strip() or min(map(len, [ids, *questions])) == 0:
        raise ValueError("an empty context or question: expected texts of at least one token")
    new_tokens = grid.new_tokens or example.new_tokens or task.new_tokens
    room = max_positions - new_tokens
    room = room if grid.max_length is None else min(room, grid.max_length)
    longest = max(question.size for question in questions)
    kept, cut = ids, 0
    if ids.size + longest > room:
        mark = encode(example.omitted) if example.omitted else ids[:0]
        front = room // 2 if task.truncation == "middle" else room - longest
        back = room - front - longest
        if task.truncation == "refuse" or front <= mark.size or back < (task.truncation == "middle"):
            accepted = (
                f"a prompt of {room:,} tokens or fewer"
                if room > 0
                else f"an answer of fewer than {max_positions:,} tokens"
            )
            raise ValueError(
                f"a prompt of {ids.size + longest:,} tokens and an answer of {new_tokens:,}: expected {accepted}"
            )
        front -= mark.size
        kept, cut = np.concatenate([ids[:front], mark, ids[ids.size - back :]]), ids.size - front - back
    refilled = grid.ends and (task.varied if grid.refill is None else grid.refill)
    return Item(task, length, example, kept, tuple(questions), new_tokens, cut, refilled)


def _check_recorded(example: Example) -> None:
    """Raises ValueError if a line of the results file, JSON in UTF-8, cannot have the answers and the facts."""
    for question in example.questions:
        for name, value in (("answers", question.answers), ("meta", {**example.meta, **question.meta})):
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name}={shown(value)}: expected texts without lone surrogates") from None
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}={shown(value)}: expected values of JSON ({error})") from None


def _texts(ids: Ids, tokenizer: Any) -> tuple[str, ...]:
    """The text of each token after the one before it: some tokenizers write a blank between two."""

    def text(*some: Any) -> str:
        return tokenizer.decode([int(token) for token in some])

    return (text(ids[0]), *(text(a, b).removeprefix(text(a)) for a, b in pairwise(ids)))


def _in_template(context: str, question: Question, tokenizer: Any) -> tuple[str, str]:
    """Applies the chat template to context and question; the opening of the answer goes into the assistant's turn."""
    asked = question.text.removesuffix(question.opening)
    turn = [{"role": "user", "content": f"{context}{MARK}{asked}"}]
    text = rendered(turn, tokenizer, answered=True)
    before, found, after = text.partition(MARK)
    if not found:
        raise ValueError("the chat template changes the text of a user's turn: expected chat: false")
    return before, after + question.opening
