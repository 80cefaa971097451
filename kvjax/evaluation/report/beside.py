"""A published ranking beside ours: a CSV file of its scores, and the rank correlation of both."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from kvjax.checks import shown
from kvjax.evaluation.entries import SETTINGS
from kvjax.evaluation.report.escape import number
from kvjax.files.reading import read_text

KEYS = ("model", "policy", "question", "removed")
MEAN = "mean"
LARGEST = 10_000_000  # bytes of a file
FEWEST = 3  # policies for a correlation


@dataclass(frozen=True)
class Published:
    """A row of a published ranking. Scores are in percent.

    Attributes:
        model: the name of the model.
        policy: the name of the policy, as it is in our results.
        question: the setting, "after" or "before".
        removed: the share of the cache that was removed, from 0 to below 1.
        mean: the mean of all its tasks, if the file states it.
        tasks: the scores by name of the task, with or without its family.
    """

    model: str
    policy: str
    question: str
    removed: float
    mean: float | None
    tasks: Mapping[str, float]

    def task(self, name: str) -> float | None:
        """The score of a task; None if it was not published."""
        return self.tasks.get(name, self.tasks.get(name.rpartition("/")[2]))

    def over(self, names: Sequence[str]) -> float | None:
        """The mean of these tasks, or the stated mean if the file has no task; None if one of them is missing."""
        found = [self.task(name) for name in names]
        return fmean(x for x in found if x is not None) if self.tasks and None not in found else self.mean


def read_published(path: Path) -> list[Published]:
    """Reads a published ranking. Raises ValueError, which names the file, the line and what is accepted."""
    reader = csv.reader(io.StringIO(read_text(path, LARGEST, "a CSV file")), strict=True)
    rows: list[Published] = []
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_names(names)
        for cells in reader:
            if cells:
                rows.append(_row(names, cells))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}, line {max(1, reader.line_num)}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no row: expected one per policy, question and share")
    keys = [(row.model, row.policy, row.question, row.removed) for row in rows]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{path} has {shown(twice)} twice: expected one row of it")
    return rows


def _check_names(names: Sequence[str]) -> None:
    accepted = f"expected the columns {', '.join(KEYS)}, then {MEAN}, names of tasks, or both"
    if tuple(names[: len(KEYS)]) != KEYS or len(names) == len(KEYS) or "" in names:
        raise ValueError(f"the columns {', '.join(names) or 'are missing'}: {accepted}")
    if len(set(names)) < len(names):
        raise ValueError(f"the columns {', '.join(names)}, two of them alike: {accepted}")


def _row(names: Sequence[str], cells: Sequence[str]) -> Published:
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells: expected {len(names)}, one per column")
    row = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    if not row["model"] or not row["policy"]:
        raise ValueError("an empty model or policy: expected a name of each")
    if row["question"] not in SETTINGS:
        raise ValueError(f"question={shown(row['question'])}: expected one of {', '.join(SETTINGS)}")
    removed = _between("removed", row["removed"], 1)
    scores = {name: _between(name, cell, 100) for name in names[len(KEYS) :] if (cell := row[name])}
    mean = scores.pop(MEAN, None)
    if mean is None and not scores:
        raise ValueError(f"no score: expected a {MEAN}, or the score of a task")
    return Published(row["model"], row["policy"], row["question"], removed, mean, scores)


def _between(name: str, text: str, most: int) -> float:
    value = number(text)
    if value is None or not 0 <= value <= most or (name == "removed" and value == 1):
        accepted = "a share from 0 to below 1" if name == "removed" else f"a number from 0 to {most}, in percent"
        raise ValueError(f"{name}={shown(text)}: expected {accepted}")
    return value


def ranks(scores: Sequence[float]) -> list[float]:
    """The rank of each score, 1 for the highest; equal scores share the mean of their ranks."""
    values = np.asarray(scores)
    return [float((values > x).sum() + ((values == x).sum() + 1) / 2) for x in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None of fewer than FEWEST scores, or where all scores of a side are equal."""
    if len(one) < FEWEST or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def is_outlier(difference: float, policies: int) -> bool:
    """Tells whether two ranks among some policies differ by a third of them or more, and by more than 2."""
    return abs(difference) > 2 and 3 * abs(difference) >= policies
