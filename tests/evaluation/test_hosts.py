"""Hosts that share a folder: they divide the work of one grid, and refuse each other's if the grids differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.batches import ReadingBatch
from kvjax.evaluation.runner import run
from kvjax.policy import Policy
from tests.evaluation.test_runner import GRID, lines, plan, right


@pytest.mark.parametrize("policies", [GRID.policies, [f"snapkv:budget={n}" for n in range(40, 50)]])
def test_hosts_share_the_work(tmp_path: Path, policies: Any) -> None:
    grid = GRID.but(policies=list(policies)) if isinstance(policies, list) else GRID
    run(plan(grid), right, tmp_path / "one")
    for host in range(2):
        run(plan(grid, host=(host, 2)), right, tmp_path / "two")
    parts = [lines(tmp_path / "two", f"results.{host}of2.jsonl") for host in range(2)]
    assert min(map(len, parts)) > 0

    def by_key(found: list[dict[str, Any]]) -> list[str]:
        return sorted(map(json.dumps, found))

    assert by_key(parts[0] + parts[1]) == by_key(lines(tmp_path / "one"))
    own = [{line["policy"] for line in part} for part in parts]
    assert (not own[0] & own[1]) == isinstance(policies, list)


def test_hosts_with_other_grids_are_refused_while_one_runs(tmp_path: Path) -> None:
    """The grid that came first stays in run.json. When its hosts are done, another one can take its place."""
    grids = [GRID.but(policies=["full", "snapkv:budget=40"]), GRID.but(policies=["full", "h2o:budget=40"])]
    problems = set()

    def beside(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
        run(plan(grids[0], host=(1, 3)), right, tmp_path)
        with pytest.raises(ValueError, match="holds a run of another grid, which is running") as error:
            run(plan(grids[1], host=(2, 3)), right, tmp_path)
        problems.add(str(error.value))
        return right(batch, policies)

    def policies() -> list[str]:
        return [policy["policy"] for policy in json.loads((tmp_path / "run.json").read_text())["grid"]["policies"]]

    first = run(plan(grids[0], host=(0, 3)), beside, tmp_path)
    assert first.answers == first.planned > 0
    assert not first.errors
    assert len(problems) == 1
    assert policies() == ["full", "snapkv:budget=40"]
    run(plan(grids[1], host=(2, 3)), right, tmp_path)
    assert policies() == ["full", "h2o:budget=40"]
