"""Runs from Python: policies and questions as objects, and the same batches, files and statistics as `kvjax eval`."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.checks import checked_size, path_of, shown
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.entries import LINES, TaskLine
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.model import plan_for, plan_run
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.report.results import Results, read_results
from kvjax.evaluation.runner import Watch
from kvjax.evaluation.runner import run as run_plan
from kvjax.evaluation.scorers import Function, Scorer, scorer
from kvjax.evaluation.tasks.own import read_tasks, tasks_of
from kvjax.evaluation.tasks.task import Task
from kvjax.evaluation.worker import load_asker
from kvjax.models import Decoder
from kvjax.policy import Policy

LOADED = "a loaded model"
OF_FILES = ("dtype", "gates")  # options of a model that is loaded from files


def run(
    model: str | os.PathLike[str] | tuple[Decoder, Any],
    policies: Mapping[str, str | Policy] | Sequence[str | Policy],
    tasks: str | Task | Sequence[str | Task | Mapping[str, Any]],
    out: str | os.PathLike[str] | None = None,
    *,
    score: str | Function = "f1",
    max_new_tokens: int = 64,
    watch: Watch | None = None,
    **options: Any,
) -> Results:
    """Asks questions under policies and returns the answers with their scores, as `kvjax eval` records them.

    Args:
        model: what `kvjax.load` takes, or the decoder and the tokenizer that it returns.
        policies: policies or their texts, by the names that tables show; or a list of them.
        tasks: names of tasks or entries of a grid, {"name": "ruler/*", "lengths": [4096]}; files of questions, *.jsonl;
            tasks; and questions, mappings with the fields of a line of such a file (docs/guide/your_data.md).
        out: the folder of the answers, where an interrupted run continues. By default a temporary one.
        score: marks the answers to files and questions: exact, contains, f1, rouge, "module:function", or a function
            (answer, expected answers) -> number in [0, 1].
        max_new_tokens: the largest number of tokens of an answer to files and questions that do not state it.
        watch: receives the progress.
        options: further fields of a `Grid`, such as question="both", budgets, limit, batch, chat and seed.

    Returns:
        The results, which `kvjax.evaluation.rows` and the functions of `kvjax.evaluation.report` take. They have all
        answers in the folder `out`, those of earlier runs too.

    Raises:
        ValueError: an argument is not accepted, a question is wrong, or no answer has a score.

    Warns:
        UserWarning: questions could not be asked or answers could not be marked. These have no score.
    """
    max_new_tokens = checked_size("max_new_tokens", max_new_tokens)
    place = None if out is None else path_of("out", out)
    named = [{"policy": p, "name": n} for n, p in policies.items()] if isinstance(policies, Mapping) else policies
    grid = Grid.of({"policies": named, "tasks": _lines(tasks, scorer(score), max_new_tokens), **options})
    plan, load = _plan(model, grid, options)
    with tempfile.TemporaryDirectory(prefix="kvjax-") if place is None else nullcontext(place) as folder:
        summary = run_plan(plan, load, Path(folder), watch)
        if summary.errors:
            more = f" (and {len(summary.errors) - 1:,} more)" if len(summary.errors) > 1 else ""
            warnings.warn(f"{summary.errors[0]}{more}", stacklevel=2)
        (results,) = read_results([folder], {line.task.name: line.task for line in grid.tasks if line.task})
    return results


def _lines(tasks: Any, marks: Scorer, new_tokens: int) -> list[Any]:
    """The entries of a grid's tasks, of which all questions together are the last one."""
    if not isinstance(tasks, Iterable | Task):
        raise ValueError(f"tasks={shown(tasks)}: expected names, files *.jsonl, tasks, or questions")
    lines: list[Any] = []
    questions: list[Mapping[str, Any]] = []
    for one in [tasks] if isinstance(tasks, str | Task | Mapping) else tasks:
        if isinstance(one, Task):
            lines.append(TaskLine(task=one))
        elif isinstance(one, str) and one.endswith(LINES):
            lines += [TaskLine(task=task) for task in read_tasks(one, marks, new_tokens)]
        elif isinstance(one, Mapping) and "name" not in one:
            questions.append(one)
        elif isinstance(one, str | Mapping):
            lines.append(one)
        else:
            raise ValueError(f"tasks has {shown(one)}: expected names, files *.jsonl, tasks, or questions")
    return lines + [TaskLine(task=task) for task in (tasks_of(questions, marks, new_tokens) if questions else ())]


def _plan(model: Any, grid: Grid, options: Mapping[str, Any]) -> tuple[RunPlan, Callable[[], Asker]]:
    """The plan, and what loads the model once it is known to be good."""
    if isinstance(model, str | os.PathLike):
        plan = plan_run(grid.but(model=os.fspath(model)))
        return plan, partial(load_asker, plan)
    if not isinstance(model, tuple) or len(model) != 2 or not isinstance(model[0], Decoder):
        what = f"model={shown(model)}" if isinstance(model, tuple) else f"model is of type {type(model).__name__}"
        raise ValueError(f"{what}: expected a path, or the decoder and the tokenizer of kvjax.load")
    if given := [name for name in OF_FILES if name in options]:
        raise ValueError(f"{given[0]}={shown(options[given[0]])} of a model that is loaded: expected it to be left out")
    params, tokenizer = model
    plan = plan_for(replace(grid, model=LOADED), tokenizer, params.config, params.embed.dtype)
    return plan, partial(Asker.of, grid, params, tokenizer)
