"""The registry of all tasks by name: those of kvjax, and those of packages with entry points in `kvjax.tasks`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from kvjax.checks import did_you_mean, shown
from kvjax.models import Registered

from . import demo_suite, longbench, longgenbench, longwriter, mathematics, needle, ruler, zero_scrolls
from .task import Task

FAMILIES = (demo_suite, ruler, needle, longbench, zero_scrolls, longgenbench, longwriter, mathematics)


def _by_name(family: str, tasks: Iterable[Task]) -> dict[str, Task]:
    """Tasks of a family by their names; raises ValueError for anything else."""
    tasks = tuple(tasks)
    if not all(isinstance(task, Task) and task.name.startswith(f"{family}/") for task in tasks):
        raise ValueError(f"{shown(tasks)}: expected tasks named {family}/...")
    return {task.name: task for task in tasks}


_OWN = {task.name: task for family in FAMILIES for task in family.TASKS}
TASKS: Registered[Task] = Registered("kvjax.tasks", _OWN, _by_name)


def find(patterns: str | Sequence[str], more: Mapping[str, Task] | None = None) -> tuple[Task, ...]:
    """The tasks that match one or more patterns, such as "ruler/*", without repetition, in the order of the patterns.

    Args:
        patterns: names or patterns.
        more: tasks by name beside those of the registry.

    Raises:
        ValueError: if a pattern matches no task. The message has the nearest names.
    """
    found: dict[str, Task] = {}
    patterns = [patterns] if isinstance(patterns, str) else patterns
    known = {**TASKS, **(more or {})} if patterns else {}
    for pattern in patterns:
        matching = {name: task for name, task in known.items() if fnmatchcase(name, pattern)}
        if not matching:
            families = ", ".join(sorted({f"{name.split('/')[0]}/*" for name in TASKS}))
            near = did_you_mean(pattern, known)
            accepted = f"a task of {families}, or a file of questions, *.jsonl"
            raise ValueError(f"no task matches {shown(pattern)}: expected {accepted}{near}")
        found |= matching
    return tuple(found.values())
