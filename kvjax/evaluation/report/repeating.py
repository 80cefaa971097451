"""Commands that repeat a cell of a run: the same prompts, answered under the same policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from kvjax.evaluation.api import LOADED
from kvjax.evaluation.entries import Cell, PolicyLine, TaskLine
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.report.results import CellName, Column
from kvjax.evaluation.tasks import registry
from kvjax.files.home import path_word

ALWAYS = ("tasks", "policies", "question")  # fields of the YAML file that stay at their defaults
APART = ("title", "model", "data")  # fields that are options of the command, or none


def command(run: Mapping[str, Any], name: CellName, columns: Sequence[Column]) -> str | None:
    """Returns shell commands that write a grid of one cell and run it; None if they cannot.

    They cannot if the run does not ask the cell, or if its model or its tasks were objects of a program.

    Args:
        run: the grid of the run, as `run.json` has it.
        name: the cell.
        columns: the tasks and lengths that they repeat, which have one length.
    """
    grid = of_cell(run, name, columns)
    if grid is None:
        return None
    file = re.sub(r"[^\w.]+", "-", "-".join(str(part) for part in name if part is not None))[:80].strip("-.") or "cell"
    options = ["--config", f"{file}.yaml", "--model", path_word(grid.model)]
    options += [] if grid.data is None else ["--data", path_word(grid.data)]
    return f"cat > {file}.yaml <<'END'\n{_yaml(grid)}END\nkvjax eval {' '.join(options)} --out {file}\n"


def of_cell(run: Mapping[str, Any], name: CellName, columns: Sequence[Column]) -> Grid | None:
    """The grid of a run with one cell and these columns alone; None if it does not ask them, or is of another version.

    Its other policies are left out before it is checked, since they may be unknown here.
    """
    for policy in run["policies"]:
        line = PolicyLine(**policy)
        if line.label == name.policy:
            try:
                budgets = run.get("budgets") if line.has_budget and line.budgets is None else None
                grid = Grid.of({**run, "policies": [policy], "title": "", "budgets": budgets})
            except ValueError:
                continue
            cell = next((cell for cell in grid.cells() if (cell.label, cell.budget, cell.question) == name), None)
            if cell is not None:
                return _only(grid, cell, columns)
    return None


def _only(grid: Grid, cell: Cell, columns: Sequence[Column]) -> Grid | None:
    tasks = tuple(line for given in grid.tasks for line in _tasks(given, columns))
    asked = {task.name for line in tasks if line.file is None for task in registry.find(line.name)}
    if any(line.file is not None for line in tasks):
        asked |= {name for name, _ in columns if name not in registry.TASKS}
    if grid.model == LOADED or not asked >= {name for name, _ in columns}:
        return None
    (policy,) = grid.policies
    if cell.budget is not None:
        policy = replace(policy, budgets=(cell.budget,))
    return replace(grid, tasks=tasks, policies=(policy,), budgets=(), question=(cell.question,))


def _tasks(line: TaskLine, columns: Sequence[Column]) -> list[TaskLine]:
    """Returns what of a line asks these columns: the line, if all its tasks are among them, or a line per task."""
    names, length = {name for name, _ in columns}, columns[0][1]
    if line.file is not None:
        return [] if names <= registry.TASKS.keys() else [line]
    try:
        found = registry.find(line.name)
    except ValueError:
        return []
    asked = [task.name for task in found if task.name in names and (length in line.lengths or not task.generated)]
    lengths = () if length is None else (length,)
    each = [line.name] if len(asked) == len(found) else asked
    return [replace(line, name=name, lengths=lengths) for name in each] if asked else []


def _yaml(grid: Grid) -> str:
    """The fields of a grid that are not at their defaults. Its lines begin with a field, a space or a dash."""
    given, default = grid.document(), Grid((), ()).document()
    fields = {name: x for name, x in given.items() if name in ALWAYS or (name not in APART and x != default[name])}
    fields["tasks"], fields["policies"] = (
        [{name: x for name, x in line.items() if x is not None and x != []} for line in fields[kind]]
        for kind in ("tasks", "policies")
    )
    plain: Any = json.loads(json.dumps(fields))  # lists for tuples
    return yaml.safe_dump(plain, sort_keys=False, width=10**9, default_flow_style=None)
