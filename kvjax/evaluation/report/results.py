"""Reads the results of runs from disk: answers by cell and task, times by cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from kvjax.checks import counted
from kvjax.evaluation.entries import SETTINGS, Budget
from kvjax.evaluation.header import labels, read_header, read_prompts
from kvjax.evaluation.lines import ASKED, Line, key_of, read_answer, read_lines, read_timing
from kvjax.evaluation.records import RESULTS, TIMINGS
from kvjax.evaluation.report.alike import Run, check_alike
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import Task, mean_scores
from kvjax.files.home import from_home


class CellName(NamedTuple):
    """The name of a cell: a policy at a budget in a setting."""

    policy: str
    budget: Budget | None
    question: str


Column: TypeAlias = tuple[str, int | None]
"""A task and the length of its prompts; the length is None if the prompts are not generated."""


@dataclass(frozen=True, eq=False)
class CellResults:
    """The marked answers of a cell and the times of its batches.

    Attributes:
        name: the name of the cell.
        lines: the answers.
        timings: the times of the batches.
        own: tasks by name that are in no registry.
    """

    name: CellName
    lines: tuple[Mapping[str, Any], ...]
    timings: tuple[Mapping[str, Any], ...]
    own: Mapping[str, Task] = field(default_factory=dict)

    @cached_property
    def by_column(self) -> dict[Column, list[Mapping[str, Any]]]:
        """The lines of each task and length."""
        found: dict[Column, list[Mapping[str, Any]]] = {}
        for line in self.lines:
            found.setdefault((line["task"], line["length"]), []).append(line)
        return found

    def scores(self, column: Column) -> dict[str, float]:
        """The scores of a task over all its answers, with the headline score first; empty without answers."""
        lines = self.by_column.get(column, [])
        if not lines:
            return {}
        given = [line["scores"] for line in lines]
        task = self._task(column)
        return mean_scores(given) if task is None else task.overall(given)

    def _task(self, column: Column) -> Task | None:
        return self.own.get(column[0]) or registry.TASKS.get(column[0])

    def headline(self, column: Column) -> float | None:
        """The first score of a task; None without answers."""
        return next(iter(self.scores(column).values()), None)

    def mean(self, columns: Sequence[Column]) -> float | None:
        """The mean of the headline scores of the columns; None if one is missing."""
        found = [self.headline(column) for column in columns]
        return None if not found or None in found else float(np.mean([x for x in found if x is not None]))

    @cached_property
    def compression(self) -> float:
        """The share of the prompts' entries that was dropped, averaged over answers, layers and heads."""
        return float(np.mean([1 - np.mean(line["kept"]) / line["compressed_tokens"] for line in self.lines]))

    def reserved_of(self, full: CellResults) -> float | None:
        """The bytes that the cache reserves, as a share of those of the full cache, over the answers that both gave.

        None if there are no such answers, or if the full cache reserves nothing for them.
        """
        bytes_of = {asked_by(line): line["kv_bytes_end"] for line in full.lines}
        both = [(line["kv_bytes_end"], bytes_of[asked_by(line)]) for line in self.lines if asked_by(line) in bytes_of]
        theirs = sum(size for _, size in both)
        return sum(size for size, _ in both) / theirs if theirs else None

    def clusters(self, column: Column, other: CellResults | None = None) -> dict[str, Float[np.ndarray, "K+1"]]:
        """The sums of the K scores of the headline and the number of answers of each example, by its id.

        Answers to the questions of one example are not independent, so the bootstrap draws them together.

        Args:
            column: the task and length.
            other: a cell; answers to questions that have no score there do not count.
        """
        task = self._task(column)
        factors = () if task is None else task.factors
        theirs = (
            None if other is None else {asked_by(line) for line in other.by_column.get(column, []) if line["scores"]}
        )
        found: dict[str, Float[np.ndarray, "K+1"]] = {}
        for line in self.by_column.get(column, []):
            if line["scores"] and (theirs is None or asked_by(line) in theirs):
                scores = [line["scores"][name] for name in factors or list(line["scores"])[:1]]
                found.setdefault(line["id"], np.zeros(len(scores) + 1))[:] += (*scores, 1)
        return found


@dataclass(frozen=True)
class Results:
    """The results of one model.

    Attributes:
        model: the name of the model in the grids.
        title: the title of the first run.
        header: facts about the model, such as bytes_per_token and layers.
        cells: the cells by name, in the order of the runs' policies.
        errors: the number of answers that are missing because of errors.
        dropped: the policies that have answers, but are in no grid of the runs any more.
        grids: the grids of the runs, as `run.json` has them.
        prompts: the texts of the tokens of some prompts, as `read_prompts` returns them.
    """

    model: str
    title: str
    header: Mapping[str, Any]
    cells: Mapping[CellName, CellResults]
    errors: int
    dropped: tuple[str, ...] = ()
    grids: tuple[Mapping[str, Any], ...] = ()
    prompts: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """All tasks and lengths, in the order of the registry."""
        place = {name: i for i, name in enumerate(registry.TASKS)}
        found = {column for cell in self.cells.values() for column in cell.by_column}
        return tuple(sorted(found, key=lambda column: (place.get(column[0], len(place)), column[0], column[1] or 0)))

    @property
    def tasks(self) -> str:
        """The number of columns in words: "1 task", "7 tasks"."""
        return counted(len(self.columns), "task")

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of all policies, in the order of the runs."""
        return tuple(dict.fromkeys(name.policy for name in self.cells))

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that have answers."""
        return tuple(setting for setting in SETTINGS if any(name.question == setting for name in self.cells))

    def budgets(self) -> tuple[Budget, ...]:
        """All budgets, from the largest to the smallest."""
        return tuple(sorted({name.budget for name in self.cells if name.budget is not None}, reverse=True))

    def full(self, question: str) -> CellResults | None:
        """The cell of the full cache in a setting; None if it was not measured."""
        cells = (cell for name, cell in self.cells.items() if name.question == question)
        return next((cell for cell in cells if cell.lines[0]["text"].strip() == "full"), None)

    def of(self, policy: str, question: str) -> list[CellResults]:
        """The cells of a policy in a setting, in order of increasing compression."""
        cells = [cell for name, cell in self.cells.items() if (name.policy, name.question) == (policy, question)]
        return sorted(cells, key=lambda cell: cell.compression)


def read_results(folders: Iterable[str | os.PathLike[str]], own: Mapping[str, Task] | None = None) -> list[Results]:
    """Reads the folders of runs and combines the results of each model.

    Args:
        folders: the folders.
        own: tasks by name that are in no registry, for the scores that they combine themselves.

    Raises:
        ValueError: if a folder has no results, if a file of it is damaged, if no answer of a model has a score, or if
            folders have answers to the same task in settings that cannot be combined.
    """
    runs: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder in map(Path, folders):
        header = read_header(folder)
        runs.setdefault(from_home(header["grid"]["model"]), []).append((folder, header))
    return [_of_model(model, some, own or {}) for model, some in runs.items()]


def _of_model(model: str, runs: Sequence[tuple[Path, Mapping[str, Any]]], own: Mapping[str, Task]) -> Results:
    each = [Run(folder, run, _read(folder, RESULTS, read_answer)) for folder, run in runs]
    for one, other in combinations(each, 2):
        check_alike(one, other)
    lines: dict[Any, Line] = {}
    for line in chain.from_iterable(run.lines for run in each):
        if "error" not in line or "error" in lines.get(key_of(line), line):  # an error hides no answer
            lines[key_of(line)] = line
    header, grids = runs[0][1], tuple(run["grid"] for _, run in runs)
    place = {label: i for i, label in enumerate(dict.fromkeys(label for _, run in runs for label in labels(run)))}
    by_cell: dict[CellName, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for line in lines.values():
        if "error" not in line:
            by_cell.setdefault(_name(line), ([], []))[0].append(line)
    if not by_cell:
        raise ValueError(f"no answer of {model} has a score: expected results with at least one scored answer")
    for took in chain.from_iterable(_read(folder, TIMINGS, read_timing) for folder, _ in runs):
        if "read_seconds" in took and _name(took) in by_cell:
            by_cell[_name(took)][1].append(took)
    dropped = tuple(dict.fromkeys(name.policy for name in by_cell if name.policy not in place))
    # Policies that an earlier grid asked stand last in the file.
    names = sorted(by_cell, key=lambda name: place.get(name.policy, len(place)))
    cells = {name: CellResults(name, tuple(by_cell[name][0]), tuple(by_cell[name][1]), own) for name in names}
    errors = sum("error" in line for line in lines.values())
    prompts = {key: pieces for folder, _ in runs for key, pieces in read_prompts(folder).items()}
    return Results(model, grids[0]["title"], header["model"], cells, errors, dropped, grids, prompts)


def _read(folder: Path, name: str, parse: Callable[[bytes], Line]) -> list[Line]:
    """The lines of a file of a folder, or of its compressed copy. A backup beside it does not count."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    return [] if path is None else read_lines(path, parse)


def asked_by(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields of a line that identify its question."""
    return tuple(line[name] for name in ASKED)


def _name(line: Mapping[str, Any]) -> CellName:
    return CellName(line["policy"], line["budget"], line["question"])
