"""A report combines the runs of a model if they asked the same, and an error of one hides no answer of another."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.batches import ReadingBatch
from kvjax.evaluation.report import page
from kvjax.evaluation.report.results import read_results
from kvjax.policy import Policy
from tests.evaluation.test_report import KEYS, NEEDLE, Marks, write
from tests.evaluation.test_runner import GRID, plan, right, run

SMALL = GRID.but(question="after", budgets=[0.5])


def fails(batch: ReadingBatch, policies: Sequence[Policy]) -> Any:
    raise RuntimeError("too large")


def test_errors_of_one_run_hide_no_answer_of_another(tmp_path: Path) -> None:
    run(plan(SMALL), right, tmp_path / "good")
    run(plan(SMALL), fails, tmp_path / "bad")
    for names in (["good", "bad"], ["bad", "good"]):
        (found,) = read_results([tmp_path / name for name in names])
        assert (found.errors, [len(cell.lines) for cell in found.cells.values()]) == (0, [25, 25])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "with seed=0, and .* with seed=1: expected a report of each"),
        ({"chat": True}, "with chat=False, and .* with chat=True: expected a report of each"),
        ({"sampler": "temperature=0.5"}, "with sampler='greedy', and .* with sampler='temperature=0.5': expected"),
        ({"new_tokens": 9}, "with new_tokens=None, and .* with new_tokens=9: expected"),
    ],
)
def test_other_settings_of_the_same_task_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    run(plan(SMALL.but(policies=["full"])), right, tmp_path / "one")
    items = plan(SMALL).items  # the tokenizer has no chat template
    run(plan(SMALL.but(policies=["snapkv:budget={budget}"], **changes), items), right, tmp_path / "other")
    with pytest.raises(ValueError, match=rf"one has answers to demo/\w+ {message}"):
        read_results([tmp_path / "one", tmp_path / "other"])


def test_other_settings_of_other_tasks_are_combined(tmp_path: Path) -> None:
    run(plan(SMALL.but(tasks=[{"name": "demo/keys", "lengths": [512]}])), right, tmp_path / "one")
    run(plan(SMALL.but(tasks=[{"name": "demo/needle", "lengths": [512]}], seed=1)), right, tmp_path / "other")
    (found,) = read_results([tmp_path / "one", tmp_path / "other"])
    assert found.columns == (("demo/needle", 512), ("demo/keys", 512))


def test_one_name_of_two_policies_is_refused(tmp_path: Path) -> None:
    for window in (16, 32):
        mine = {"name": "mine", "policy": f"snapkv:budget={{budget}},window={window}"}
        run(plan(SMALL.but(policies=["full", mine])), right, tmp_path / f"w{window}")
    with pytest.raises(
        ValueError, match=r"w16 has mine 0.5 after .*window=16', and .*w32 as .*window=32': expected diff"
    ):
        read_results([tmp_path / "w16", tmp_path / "w32"])


def test_one_policy_with_two_gates_is_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run(plan(SMALL.but(policies=["full", "kvzap:budget={budget}"], gates=[name])), right, tmp_path / name)
    with pytest.raises(ValueError, match=r"kvzap 0.5 after \S+ with gates=\['first'\], and .* with gates=\['second'\]"):
        read_results([tmp_path / "first", tmp_path / "second"])


def test_runs_of_a_version_that_states_less_are_combined(tmp_path: Path) -> None:
    run(plan(SMALL.but(policies=["full"])), right, tmp_path / "old")
    header = json.loads((tmp_path / "old" / "run.json").read_text())
    header["grid"].pop("chat")
    header["model"].pop("dtype")
    (tmp_path / "old" / "run.json").write_text(json.dumps(header))
    run(plan(SMALL), right, tmp_path / "new")
    (found,) = read_results([tmp_path / "old", tmp_path / "new"])
    assert found.policies == ("full", "snapkv")


def test_a_backup_beside_the_results_does_not_count(tmp_path: Path) -> None:
    run(plan(SMALL.but(policies=["full"])), right, tmp_path)
    content = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results_old.jsonl").write_text(content.replace('"exact_match": 1.0', '"exact_match": 0.0'))
    (tmp_path / "results.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "timings.jsonl.gz").write_bytes(gzip.compress((tmp_path / "timings.jsonl").read_bytes()))
    (found,) = read_results([tmp_path])
    (cell,) = found.cells.values()
    assert (cell.mean(found.columns), sum(took["answers"] for took in cell.timings)) == (1, 25)


@pytest.mark.parametrize(("answers", "said"), [(3, False), (2, True)])
def test_a_report_says_if_policies_answered_other_questions(answers: int, said: bool, tmp_path: Path) -> None:
    marks: Marks = {("full", None): {KEYS: [[1]] * 3, NEEDLE: [[1]]}, ("h2o", 0.5): {KEYS: [[1]] * answers}}
    text = page.write(tmp_path / "out", read_results([write(tmp_path / "run", marks)]), (), print)
    assert ("**Some policies have answers to other questions of a task than others**" in text) == said
