"""Checks that the runs of a report asked the same, where they asked the same tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.checks import shown
from kvjax.evaluation.header import ASKING, described, describes, reads_gates
from kvjax.evaluation.lines import Line


@dataclass(frozen=True)
class Run:
    """The folder of a run, the content of its `run.json`, and its lines."""

    folder: Path
    header: Mapping[str, Any]
    lines: Sequence[Line]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns what the answers to each task depend on, as far as the version that wrote the run states it."""
        grid, model, facts = self.header["grid"], self.header["model"], self.header.get("tasks", {})
        common = {name: grid[name] for name in ASKING if name in grid}
        common |= {name: model[name] for name in ("dtype",) if name in model}  # of the cache
        return {
            task: common | {name: x for name, x in facts.get(task, {}).items() if name != "file"}
            for task in dict.fromkeys(line["task"] for line in self.lines if "error" not in line)
        }

    def texts(self) -> dict[tuple[Any, ...], str]:
        """The texts of the policies that have answers, by label, budget, setting and task."""
        names = ("policy", "budget", "question", "task")
        return {tuple(line[name] for name in names): line["text"] for line in self.lines if "error" not in line}


def check_alike(one: Run, other: Run) -> None:
    """Raises ValueError if two runs of a model have answers to the same task that cannot be in one report."""
    apart = "expected a report of each"
    ours, theirs = one.settings(), other.settings()
    for task, facts in ours.items():
        for name in [name for name in facts if name in theirs.get(task, {})]:
            mine, its = facts[name], theirs[task][name]
            if mine != its:
                raise ValueError(
                    f"{one.folder} has answers to {task} with {name}={shown(mine)}, and {other.folder} with "
                    f"{name}={shown(its)}: {apart}"
                )
    gates = [run.header["grid"].get("gates") or [] for run in (one, other)]
    texts = other.texts()
    for key, text in one.texts().items():
        if key not in texts:
            continue
        policy, names = described(text), " ".join(str(part) for part in key if part is not None)
        if not describes(texts[key], text, policy):
            raise ValueError(
                f"{one.folder} has {names} as {shown(text)}, and {other.folder} as {shown(texts[key])}: expected "
                "different names, or a report of each"
            )
        if gates[0] != gates[1] and policy is not None and reads_gates(policy):
            raise ValueError(
                f"{one.folder} has answers of {names} with gates={shown(gates[0])}, and {other.folder} with "
                f"gates={shown(gates[1])}: {apart}"
            )
