"""Renders results as a leaderboard: one self-contained HTML file, a fixed page with the numbers as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from statistics import fmean
from typing import Any

from kvjax.evaluation.entries import SETTINGS, Budget
from kvjax.evaluation.report import beside, escape
from kvjax.evaluation.report.beside import Published
from kvjax.evaluation.report.example import example_of
from kvjax.evaluation.report.families import budget_of, families
from kvjax.evaluation.report.repeating import command
from kvjax.evaluation.report.results import CellName, CellResults, Column, Results
from kvjax.evaluation.report.statistics import FEWEST, difference, interval
from kvjax.evaluation.report.tables import MEANING
from kvjax.files.home import without_home
from kvjax.files.writing import write_file

PAGE, STYLE = "page.html", "page.css"
SCRIPTS = ("values.js", "table.js", "curves.js", "panel.js", "published.js", "main.js")  # one after the other


Benchmark = tuple[str, int | None]
"""The family of tasks, and the length of their prompts."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A policy at a budget in a setting, on the tasks of one benchmark.

    Attributes:
        model: the place of the model among the results.
        benchmark: the benchmark.
        columns: its tasks that the model was asked.
        results: the answers to these tasks.
        full: those of the full cache; None if it was not measured.
        command: what repeats the cell; None if nothing does.
    """

    model: int
    benchmark: Benchmark
    columns: tuple[Column, ...]
    results: CellResults
    full: CellResults | None
    command: str | None

    @property
    def name(self) -> CellName:
        return self.results.name

    @property
    def is_full(self) -> bool:
        return self.results is self.full

    @property
    def group(self) -> tuple[Any, ...]:
        """Returns what cells that are ranked together have in common."""
        return self.model, self.benchmark, self.name.question, self.budget

    @cached_property
    def budget(self) -> Budget | None:
        """The budget of the cell, or else of its policy."""
        return budget_of(self.results.lines[0]["text"]) if self.name.budget is None else self.name.budget

    @cached_property
    def mean(self) -> float | None:
        """The mean of all tasks, rounded, so that equal means are equal."""
        mean = self.results.mean(self.columns)
        return None if mean is None else round(mean, 9)

    @property
    def removed(self) -> float | None:
        """The share of the entries that the budget removes; None for a number of entries, or an unknown budget."""
        if self.is_full:
            return 0.0
        return round(1 - self.budget, 6) if isinstance(self.budget, float) else None


def write(path: str | os.PathLike[str], several: Sequence[Results], published: Sequence[Published] = ()) -> int:
    """Writes the leaderboard of runs as one HTML file, and returns its number of cells.

    Args:
        path: the file.
        several: the results of each model.
        published: rows of a published ranking, to be shown beside ours.

    Raises:
        OSError: the file cannot be written.
    """
    made = board(several, published)
    write_file(path, page(made))
    return len(made["cells"])


def page(made: Mapping[str, Any]) -> str:
    """Returns an HTML document that shows a board. It opens from disk and needs no network."""
    # "</script" and "<!--" are special in a script element. In a JSON string, "\u003c" equals "<".
    text = json.dumps(made, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {name: (files(__package__) / "board" / name).read_text("utf-8") for name in (PAGE, STYLE, *SCRIPTS)}
    inside = {"PAGE_CSS": parts[STYLE], "PAGE_JS": "\n".join(parts[name] for name in SCRIPTS), "BOARD_AS_JSON": text}
    document = parts[PAGE]
    for place, content in inside.items():
        assert document.count(place) == 1
        document = document.replace(place, content)
    return document


def board(several: Sequence[Results], published: Sequence[Published] = ()) -> dict[str, Any]:
    """Returns what the page shows, as values of JSON. Scores and shares are in percent."""
    cells = [cell for i, one in enumerate(several) for cell in _cells(i, one)]
    tasks: dict[Benchmark, list[str]] = {}
    for cell in cells:
        known = tasks.setdefault(cell.benchmark, [])
        known += [task for task, _ in cell.columns if task not in known]
    benchmarks = [_benchmark(*benchmark, names) for benchmark, names in tasks.items()]
    titles = {grid["title"] for one in several for grid in one.grids} - {""}
    policies = list(dict.fromkeys(cell.name.policy for cell in cells))
    texts = {cell.name.policy: cell.results.lines[0]["text"] for cell in reversed(cells)}
    asked: dict[tuple[Any, ...], Any] = {}
    means: dict[tuple[Any, ...], list[float]] = {}
    for cell in cells:
        if cell.mean is not None:
            means.setdefault(cell.group, []).append(cell.mean)
    found = {
        "title": titles.pop() if len(titles) == 1 else f"Leaderboard: {'; '.join(one['name'] for one in benchmarks)}",
        "fewest": FEWEST,
        "questions": {setting: MEANING[setting] for setting in SETTINGS},
        "models": [{"name": results.model, "errors": results.errors} for results in several],
        "benchmarks": benchmarks,
        "policies": [{"name": policy, "families": families(texts[policy])} for policy in policies],
        "cells": [
            {"policy": policies.index(cell.name.policy), "benchmark": list(tasks).index(cell.benchmark)}
            | _numbers(cell, tasks[cell.benchmark], means.get(cell.group, []))
            | {"example": example_of(cell.results, cell.full, several[cell.model], asked)}
            for cell in cells
        ],
        "asked": list(asked.values()),
        "published": _published(cells, published, tasks),
    }
    return without_home(found)


def _cells(model: int, results: Results) -> Iterator[Cell]:
    """The cells of a model, in the order of its benchmarks and of its runs."""
    found: dict[Benchmark, list[Column]] = {}
    for task, length in results.columns:
        found.setdefault((task.partition("/")[0], length), []).append((task, length))
    for benchmark, columns in found.items():
        own = {
            name: replace(cell, lines=lines)
            for name, cell in results.cells.items()
            if (lines := tuple(line for column in columns for line in cell.by_column.get(column, [])))
        }
        of_benchmark = replace(results, cells=own)
        for name, cell in own.items():
            answered = [column for column in columns if column in cell.by_column]
            made = [(grid.get("limit") or math.inf, command(grid, name, answered)) for grid in results.grids]
            commands = [(limit, text) for limit, text in made if text is not None]
            _, most = max(commands, key=lambda each: each[0], default=(0, None))
            yield Cell(model, benchmark, tuple(columns), cell, of_benchmark.full(name.question), most)


def _benchmark(family: str, length: int | None, names: Sequence[str]) -> dict[str, Any]:
    tasks = [name.partition("/")[2] or name for name in names]
    return {"name": family if length is None else f"{family}, {length:,} tokens", "tasks": tasks}


def _numbers(cell: Cell, names: Sequence[str], means: Sequence[float]) -> dict[str, Any]:
    """The numbers of a cell. `tasks` has a list per task: score, ends, prompts, and the difference with its ends.

    Args:
        cell: the cell.
        names: the tasks of the benchmark.
        means: of all cells that it is ranked with.
    """
    results, full, mean = cell.results, cell.full, cell.mean
    rank = None if mean is None or cell.budget is None else 1 + sum(x > mean for x in means)
    kept = [line["kept"] for line in results.lines]
    layers = [fmean(layer) for layer in zip(*kept, strict=False)] if len(set(map(len, kept))) == 1 else []
    return {
        "model": cell.model,
        "question": cell.name.question,
        "budget": cell.budget,
        "removed": _percent(cell.removed),
        "dropped": _percent(results.compression),
        "full": cell.is_full,
        "text": results.lines[0]["text"],
        "rank": rank,
        "mean": _percents(interval(results, cell.columns)),
        "difference": None if full is None or cell.is_full else _percents(difference(results, full, cell.columns)),
        "asked": len(cell.columns),
        "prompts": sum(len(results.clusters(column)) for column in cell.columns),
        "tasks": [_task(cell, (name, cell.benchmark[1])) for name in names],
        "bytes": round(fmean(line["kv_bytes_end"] for line in results.lines)),
        "of_full": None if full is None else _percent(results.reserved_of(full)),
        "kept": [round(layer, 1) for layer in layers],
        "command": cell.command,
    }


def _task(cell: Cell, column: Column) -> list[float | int | None] | None:
    found = interval(cell.results, (column,))
    if found is None:
        return None
    paired = None if cell.full is None or cell.is_full else difference(cell.results, cell.full, [column])
    scores = _percents(found) or []
    return [*scores, len(cell.results.clusters(column)), *(_percents(paired) or [None, None, None])]


def _percent(share: float | None) -> float | None:
    return None if share is None or math.isnan(share) else round(100 * share, 2)


def _percents(found: Sequence[float] | None) -> list[float | None] | None:
    """The mean and the ends of its interval."""
    return None if found is None else [_percent(x) for x in found[:3]]


def _published(
    cells: Sequence[Cell], rows: Sequence[Published], tasks: Mapping[Benchmark, Sequence[str]]
) -> dict[str, Any] | None:
    """The published scores beside ours: a group per benchmark, published model, setting and share."""
    if not rows:
        return None
    ours: dict[tuple[Any, ...], list[int]] = {}
    for i, cell in enumerate(cells):
        if cell.removed is not None and cell.mean is not None:
            ours.setdefault((cell.model, cell.benchmark, cell.name.question, cell.removed), []).append(i)
    groups = []
    for (_, benchmark, question, removed), places in ours.items():
        for name in dict.fromkeys(row.model for row in rows):
            there = {r.policy: r for r in rows if (r.model, r.question, r.removed) == (name, question, removed)}
            group = _group([(i, cells[i]) for i in places], there, tasks[benchmark])
            if group["rows"]:
                about = {"cell": places[0], "question": question, "removed": _percent(removed), "published": name}
                groups.append(about | group)
    known = {cell.name.policy for cell in cells}
    missing = [policy for policy in dict.fromkeys(row.policy for row in rows) if policy not in known]
    return {"groups": groups, "missing": [escape.line(policy) for policy in missing]}


def _group(places: Sequence[tuple[int, Cell]], there: Mapping[str, Published], names: Sequence[str]) -> dict[str, Any]:
    """Ranks the policies that are in both, by the mean of the tasks that the model was asked."""
    both = [
        (i, float(cell.mean or 0.0), mean, there[cell.name.policy])
        for i, cell in places
        if cell.name.policy in there
        and (mean := there[cell.name.policy].over([task for task, _ in cell.columns])) is not None
    ]
    ours, theirs = [mean for _, mean, _, _ in both], [mean for _, _, mean, _ in both]
    ranked = zip(both, beside.ranks(ours), beside.ranks(theirs), strict=True)
    return {
        "spearman": None if (found := beside.spearman(ours, theirs)) is None else round(found, 3),
        "rows": [
            {
                "cell": i,
                "mean": round(mean, 2),
                "ranks": [own, their],
                "outlier": beside.is_outlier(own - their, len(both)),
                "tasks": [row.task(name) for name in names],
            }
            for (i, _, mean, row), own, their in ranked
        ],
    }
