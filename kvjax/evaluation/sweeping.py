"""Answers the batches of a sweep, marks the answers, and finds out which example or policy an error belongs to."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias

import jax

from kvjax import __version__
from kvjax.checks import LARGEST
from kvjax.evaluation.asking import Answer, Answers, Ended, Took
from kvjax.evaluation.batches import Ask, Reading, ReadingBatch, halves
from kvjax.evaluation.entries import Cell
from kvjax.evaluation.lines import ASKED, Key, Line, checked_scores
from kvjax.evaluation.planning import RunPlan, about, cell_fields, keys_of, name_of
from kvjax.policy import Policy
from kvjax.runtime.memory import out_of_memory
from kvjax.runtime.modes import in_own_modes

Say: TypeAlias = Callable[[str], None]
Asked: TypeAlias = tuple[ReadingBatch, Sequence[Cell]]
"""A batch, and the cells that lack answers to it."""


class Answering(Protocol):
    """Answers questions with a model; `asking.Asker` does."""

    def __call__(self, batch: ReadingBatch, policies: Sequence[Policy]) -> Iterator[tuple[int, Answers, Took]]: ...

    def refilled(self, batches: Iterable[ReadingBatch], policy: Policy, rows: int) -> Iterator[Ended]: ...


@dataclass(frozen=True)
class Task:
    """Batches of one sweep that lack answers.

    Attributes:
        sweep: the index of the sweep in the plan.
        refilled: whether rows are refilled, from any of the batches. There is one cell then.
        asked: the batches.
    """

    sweep: int
    refilled: bool
    asked: tuple[Asked, ...]

    def without(self, answered: Container[Key]) -> Task:
        """Returns the rest: batches with the cells that lack answers; of refilled rows, the prompts that do."""

        def left(cell: Cell, *readings: Reading) -> bool:
            return any(key not in answered for key in keys_of(cell, readings))

        asked: list[Asked] = []
        for batch, cells in self.asked:
            cells = [cell for cell in cells if left(cell, *batch.readings)]
            if cells and self.refilled:
                batch = replace(batch, readings=tuple(one for one in batch.readings if left(cells[0], one)))
            if cells:
                asked.append((batch, cells))
        return replace(self, asked=tuple(asked))


@dataclass(frozen=True)
class Part:
    """Answers of a cell, as soon as they exist.

    Attributes:
        cell: the cell.
        lines: lines of the results file.
        timing: the line of the timings file, once all answers of a batch exist.
    """

    cell: Cell
    lines: list[Line]
    timing: Line | None = None


class Sweeping:
    """Answers tasks of one sweep.

    If the memory is exceeded, the cells are halved first, down to one, and then the batch, which all cells share again.
    The sizes that fit stay for all later batches. A cell that fails on its own is asked on its own from then on, so
    that its failures do not affect the others. If an error ends answers in rows that are refilled, their batches are
    asked one by one.
    """

    def __init__(self, plan: RunPlan, ask: Answering, say: Say):
        self.plan, self.ask, self.say = plan, ask, say
        self.most_rows: int | None = None
        self.most_cells: int | None = None
        self.apart: set[Cell] = set()

    def answers(self, task: Task) -> Iterator[Part]:
        """Yields the answers of a task as they come."""
        return in_own_modes(self._refilled(task.asked) if task.refilled else self._padded(task.asked))

    def _refilled(self, asked: Sequence[Asked]) -> Iterator[Part]:
        """Answers the batches of one cell in rows that are refilled."""
        cell, waiting = asked[0][1][0], [batch for batch, _ in reversed(asked)]
        policy = cell.build()
        while waiting:
            taken: list[ReadingBatch] = []
            rows = min(self.plan.rows_together(waiting, policy), self.most_rows or LARGEST)
            try:
                for ended in self.ask.refilled(self._taken(waiting, taken), policy, rows):
                    timing = None
                    if ended.took is not None:
                        taken[:] = [batch for batch in taken if batch is not ended.batch]
                        timing = self._timing(cell, ended.batch, ended.took, 1)
                    yield Part(cell, [self._line(cell, ended.reading, ended.index, ended.answer)], timing)
            except Exception as error:  # a policy may raise anything
                problem, full = f"{type(error).__name__}: {error}", out_of_memory(error)
            else:
                continue
            left = taken or [waiting.pop()]
            if not (full and self._halve_rows(cell, replace(left[0], rows=max(rows, left[0].rows)))):
                self.say(f"{name_of(cell)}: {problem}; the run asks {len(left)} batches one by one")
            yield from self._padded([(batch, [cell]) for batch in left])

    def _taken(self, waiting: list[ReadingBatch], taken: list[ReadingBatch]) -> Iterator[ReadingBatch]:
        """Takes the batches that wait, last first, in parts that fit into the memory."""
        while waiting:
            batch = waiting.pop()
            if self.most_rows is not None and batch.rows > self.most_rows:
                waiting += reversed(halves(batch, self.plan.grid.mesh[0]))
                continue
            taken.append(batch)
            yield batch

    def _halve_rows(self, cell: Cell, batch: ReadingBatch) -> bool:
        """Halves the most rows of a batch. Returns whether it had more than the fewest."""
        rows = halves(batch, self.plan.grid.mesh[0])[0].rows
        if rows == batch.rows:
            return False
        self.most_rows, self.most_cells = rows, None
        self.say(f"{name_of(cell)}: out of memory with {batch.rows} prompts; the run continues with {rows}")
        return True

    def _padded(self, asked: Sequence[Asked]) -> Iterator[Part]:
        """Answers batches that end with their longest answers, each in all of its cells."""
        waiting = list(reversed(asked))
        multiple = self.plan.grid.mesh[0]
        while waiting:
            batch, cells = waiting.pop()
            parts = halves(batch, multiple)
            if self.most_rows is not None and batch.rows > self.most_rows:
                waiting += [(part, cells) for part in reversed(parts)]
                continue
            if len(divided := self._divided(cells)) > 1:
                waiting += [(batch, some) for some in reversed(divided)]
                continue
            left = list(cells)
            try:
                for i, answers, took in self.ask(batch, [cell.build() for cell in cells]):
                    cell = cells[i]
                    yield Part(cell, self._lines(cell, batch, answers), self._timing(cell, batch, took, len(cells)))
                    left.remove(cell)
            except Exception as error:  # a policy may raise anything; each example that it affects gets the error
                problem, full = f"{type(error).__name__}: {error}", out_of_memory(error)
            else:
                continue
            if full and len(left) > 1:
                self.most_cells = (len(left) + 1) // 2
                self.say(
                    f"{name_of(left[0])}: out of memory with the caches of {len(cells)} policies and budgets; the run "
                    f"continues with {self.most_cells}"
                )
                waiting.append((batch, left))
            elif full and self._halve_rows(left[0], batch):
                waiting += [(part, left) for part in reversed(parts)]
            elif len(left) > 1:
                middle = (len(left) + 1) // 2
                waiting += [(batch, left[middle:]), (batch, left[:middle])]
            elif not full and len(batch.readings) > 1:
                self.apart.add(left[0])
                waiting += [(part, left) for part in reversed(parts)]
            else:
                self.apart.add(left[0])
                yield Part(left[0], failed(left[0], batch, problem), self._timing(left[0], batch, None, 1))

    def _divided(self, cells: Sequence[Cell]) -> list[Sequence[Cell]]:
        """The cells that may share a prefill: not those that failed, and no more than the memory holds."""
        sound = [cell for cell in cells if cell not in self.apart]
        size = self.most_cells or max(len(sound), 1)
        groups: list[Sequence[Cell]] = [sound[i : i + size] for i in range(0, len(sound), size)]
        return groups + [[cell] for cell in cells if cell in self.apart]

    def _lines(self, cell: Cell, batch: ReadingBatch, answers: Answers) -> list[Line]:
        return [
            self._line(cell, reading, i, answer)
            for reading, mine in zip(batch.readings, answers, strict=True)
            for i, answer in enumerate(mine)
        ]

    def _line(self, cell: Cell, reading: Reading, index: int, answer: Answer) -> Line:
        """The line of the answer to a question of a reading."""
        common = {"text": cell.policy, "seed": self.plan.grid.seed, "versions": versions()}
        return about(cell, [reading])[index] | _marked(reading, reading.asks[index], answer) | common

    def _timing(self, cell: Cell, batch: ReadingBatch, took: Took | None, shared: int) -> Line:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        answers = sum(len(reading.asks) for reading in batch.readings)
        facts = cell_fields(cell) | {
            "rows": batch.rows,
            "prompts": len(batch.readings),
            "answers": answers,
            "shared": shared,
            "prompt_size": batch.readings[0].size,
            "device": jax.devices()[0].device_kind if took is not None else None,
            "ended": now,
            "questions": [[line[name] for name in ASKED] for line in about(cell, batch.readings)],
        }
        return facts | ({} if took is None else asdict(took))


def failed(cell: Cell, batch: ReadingBatch, problem: str) -> list[Line]:
    """The lines of a batch that could not be asked in a cell."""
    return [line | {"error": problem} for line in about(cell, batch.readings)]


def _marked(reading: Reading, ask: Ask, answer: Answer) -> dict[str, Any]:
    """The fields of an answer: its scores, or an error if it cannot be marked."""
    question = ask.item.example.questions[ask.index]
    facts = ask.item.asked(ask.index) | {
        "prediction": answer.text,
        "tokens": answer.tokens,
        "cut": ask.item.cut,
        "compressed_tokens": reading.prompt.size + ask.lead.size,
        "kept": answer.kept,
        "kv_bytes": answer.kv_bytes,
        "kv_bytes_end": answer.kv_bytes_end,
        "meta": {**ask.item.example.meta, **question.meta},
    }
    if answer.retained is not None:
        facts["retained"] = answer.retained
    try:
        return {"scores": checked_scores(ask.item.task.metric(answer.text, question))} | facts
    except Exception as error:  # a judge that does not answer, a package that is missing
        return {"error": f"the answer could not be marked: {type(error).__name__}: {error}"} | facts


def versions() -> dict[str, str]:
    """The versions of the libraries that answers depend on."""
    return {"jax": jax.__version__, "kvjax": __version__}
