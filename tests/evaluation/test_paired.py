"""Intervals and differences are of the score that a table shows, on the questions that both policies answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.evaluation.report import tables
from kvjax.evaluation.report.results import Results, read_results
from kvjax.evaluation.report.statistics import difference, interval
from tests.evaluation.test_report import KEYS, Marks, write

REPORTS = ("zero_scrolls/gov_report", None)
ROUGE = ("rouge1", "rouge2", "rougeL")


def with_scores(folder: Path, change: object) -> Results:
    """The results of a folder after `change` has had each line of it; without the lines for which it returns None."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    changed = [line for line in map(change, lines) if line is not None]  # type: ignore[call-overload]
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    (results,) = read_results([folder])
    return results


def test_intervals_of_zero_scrolls_are_of_the_mean_of_rouge(tmp_path: Path) -> None:
    """Half of the answers share no pair of words with the reference: the mean of geometric means is half as large."""
    marks: Marks = {("full", None): {REPORTS: [[1]] * 20}, ("snapkv", 0.5): {REPORTS: [[1]] * 20}}  # type: ignore[dict-item]

    def rouge(line: dict) -> dict:
        two = 0.2 * (int(line["id"]) % 2)
        half = 1 if line["policy"] == "full" else 0.5
        values = [0.4 * half, two * half, 0.2 * half]
        return line | {"scores": {"rouge": np.prod(values) ** (1 / 3)} | dict(zip(ROUGE, values, strict=True))}

    results = with_scores(write(tmp_path / "run", marks), rouge)
    full, snapkv = results.cells.values()
    mean = (0.4 * 0.1 * 0.2) ** (1 / 3)
    found = interval(full, (REPORTS,))
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.low < mean < found.high
    assert found.low > (0.4 * 0.02 * 0.2) ** (1 / 3)
    paired = difference(snapkv, full, [REPORTS])
    assert paired is not None
    assert paired.mean == pytest.approx(-mean / 2)
    assert paired.low <= paired.mean <= paired.high
    assert paired.p < 0.001


def test_differences_are_on_the_questions_that_both_answered(tmp_path: Path) -> None:
    """Each policy lacks another question of every text, and its lines have an order of their own."""
    marks: Marks = {("a", 0.5): {KEYS: [[1, 0, x] for x in (1, 0, 1, 0)]}, ("b", 0.5): {KEYS: [[0, 1, 0]] * 4}}
    folder = write(tmp_path / "run", marks)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join([*lines[:12], *reversed(lines[12:])]))
    missing = {"a": 0, "b": 1}
    results = with_scores(folder, lambda line: None if line["asked"] == missing[line["policy"]] else line)
    a, b = results.cells.values()
    found = difference(a, b, [KEYS])
    assert found is not None
    assert found.mean == 0.5  # of the third questions alone
    swapped = difference(b, a, [KEYS])
    assert swapped is not None
    assert swapped[:3] == (-found.mean, -found.high, -found.low)


def test_the_highest_repetition_is_not_the_best(tmp_path: Path) -> None:
    marks: Marks = {("full", None): {KEYS: [[1]]}, ("snapkv", 64): {KEYS: [[1]]}, ("h2o", 64): {KEYS: [[0]]}}

    def repeats(line: dict) -> dict:
        much = 0.9 if line["policy"] == "h2o" else 0.1
        return line | {"scores": line["scores"] | {"repetition": much}}

    (table,) = tables.scores(with_scores(write(tmp_path / "run", marks), repeats), "after")
    assert table.headings == ("policy", "exact_match", "repetition")
    assert table.bold() == {(1, 1)}
