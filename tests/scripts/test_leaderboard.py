"""The script of the leaderboard: its steps, and the grids that they run."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from kvjax.evaluation.grid import Grid
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
GRIDS = ROOT / "configs" / "leaderboard"
OTHERS = {"statistics", "page"}  # steps without a grid
APART = {"peer", "small"}  # grids of other commands


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/leaderboard.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


def test_steps_are_the_grids() -> None:
    steps = {line.split()[0] for line in script("--list").stdout.splitlines()}
    assert steps - OTHERS == {path.stem for path in GRIDS.glob("*.yaml")} - APART


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected MODEL DATA"),
        (("model",), "expected MODEL DATA"),
        (("model", "data", "frist"), "unknown step frist: expected some of statistics once"),
    ],
)
def test_what_is_not_accepted(arguments: tuple[str, ...], message: str) -> None:
    ended = script(*arguments)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_a_policy_has_one_meaning_in_all_grids() -> None:
    """The page joins the answers of all steps by the names of policies."""
    texts: dict[str, set[str]] = {}
    for path in GRIDS.glob("*.yaml"):
        if path.stem not in APART:
            for line in Grid.read(path).policies:
                texts.setdefault(line.label, set()).add(line.text)
    assert {label: found for label, found in texts.items() if len(found) > 1} == {}


def test_published_policies_are_in_the_grids() -> None:
    with (ROOT / "docs" / "results" / "leaderboard" / "published.csv").open(encoding="utf-8") as file:
        published = {(row["policy"], row["question"]) for row in csv.DictReader(file)}
    asked = {
        (line.label, question)
        for path in GRIDS.glob("*.yaml")
        for grid in [Grid.read(path)]
        for question in grid.question
        for line in grid.policies
    }
    assert published - asked == {("duo_attention", "after")}  # no gates of it were trained
