"""`kvjax compare`: a table that decides, with the numbers of `kvjax report`, and eval on files of questions."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.report import tables
from kvjax.evaluation.report.compared import Compared, compared
from kvjax.evaluation.report.results import Results, read_results
from kvjax.evaluation.report.statistics import Difference, Interval, difference
from tests.cli.commands import kv
from tests.evaluation.test_own_run import questions
from tests.evaluation.test_report import KEYS, NEEDLE, Marks, write

POLICIES = ("snapkv:budget=0.5,window=4", "h2o:budget=8")


def asked(*more: Any) -> tuple[Any, ...]:
    return ("compare", "demo", *(f"--policy={policy}" for policy in POLICIES), "--max-new-tokens", 8, *more)


def costs_of(results: Results, question: str) -> dict[str, dict[str, str]]:
    """The cells of the report's table of costs by policy and heading."""
    table = tables.costs(results, question)
    return {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}


@pytest.mark.long
def test_the_table_has_the_numbers_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kvjax.evaluation.report.compared.LEAST_TOKENS", 1)
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (the extra `plot`)")
    file, out, picture = questions(tmp_path / "mine.jsonl"), tmp_path / "out", tmp_path / "a.png"
    command = asked("--tasks", file, "--scorer", "contains", "--question", "both", "--out", out)
    status, stdout, stderr = kv(*command, "--picture", picture)
    assert status == 0, stderr
    assert max(map(len, stdout.splitlines())) <= 80
    assert "8 questions about 4 texts, question unknown while compressing" in stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, shown, _ = kv(*command, "--json")
    document = json.loads(shown)
    (results,) = read_results([out])
    averages = {q: {row[0]: row[1] for row in tables.averages(results, q).rows} for q in ("after", "before")}
    costs = {q: costs_of(results, q) for q in ("after", "before")}
    for row in document["policies"]:
        policy, question, score = row["policy"], row["question"], row["score"]
        text = f"{100 * score['mean']:.1f} ({100 * score['low']:.1f} to {100 * score['high']:.1f})"
        assert averages[question][policy] == text
        cost = costs[question][policy]
        assert cost["MB reserved per row"] == f"{row['cache_bytes'] / 1e6:.3g}"
        assert cost["decoded tokens/s"] == f"{row['tokens_per_second']:.4g}"
        assert cost["of full"] == f"{row['memory'] or 1:.3f}"
        if policy == "full":
            assert (row["difference"], row["sentence"]) == (None, None)
            continue
        table = {line[0]: line[2:] for line in tables.comparison(results, question, "full").rows}[policy]
        found = row["difference"]
        span = f"{100 * found['low']:.1f} to {100 * found['high']:.1f}"
        assert table == (f"{100 * found['mean']:+.1f}", span, tables.p_text(found["p"]))
        assert row["sentence"] in " ".join(stdout.split())
    assert [(row["policy"], row["question"]) for row in document["policies"]] == [
        (policy, question) for question in ("after", "before") for policy in ("full", *POLICIES)
    ]
    assert (document["against"], document["score"], document["texts"], document["questions"]) == (
        "full",
        "contains",
        4,
        8,
    )
    status, stdout, _ = kv(*command[:3], "--tasks", file, "--scorer=contains", "--max-new-tokens=8", "--out", out)
    assert status == 0
    assert "h2o" not in stdout  # which the folder holds answers of
    few = json.loads(kv(*command, "--limit", 2, "--json")[1])
    assert (few["texts"], few["policies"][1]["difference"]["p"]) == (2, None)
    assert "too few for an interval" in few["policies"][1]["sentence"]


def test_the_reference_may_be_another_policy(tmp_path: Path) -> None:
    file = questions(tmp_path / "mine.jsonl")
    status, shown, _ = kv(*asked("--tasks", file, "--against", POLICIES[1], "--json"))
    document = json.loads(shown)
    assert (status, [row["policy"] for row in document["policies"]]) == (0, [POLICIES[1], POLICIES[0]])
    assert document["out"] is None


SAID = {
    (-0.031, -0.052, -0.01, 0.004): "h2o loses 3.1 points (1.0 to 5.2) at 0.31 of the memory of full",
    (0.031, 0.01, 0.052, 0.004): "h2o gains 3.1 points (1.0 to 5.2) at 0.31 of the memory of full",
    (-0.01, -0.03, 0.01, 0.4): "h2o: no difference shown (-3.0 to +1.0 points, p 0.400) at 0.31 of the memory of full",
    (-0.8, -1, -0.4, 0.125): "h2o: no difference shown (-100.0 to -40.0 points, p 0.125) at 0.31 of the memory of full",
    (0, 0, 0, 1): "h2o: no difference shown (+0.0 to +0.0 points, p 1.000) at 0.31 of the memory of full",
    (-0.5, math.nan, math.nan, math.nan): (
        "h2o: -50.0 points at 0.31 of the memory of full; a task has fewer than 4 texts, too few for an interval"
    ),
}


@pytest.mark.parametrize("given", SAID)
def test_what_follows(given: tuple[float, float, float, float]) -> None:
    row = Compared("h2o", "after", Interval(0.5, 0.4, 0.6), Difference(*given), 310.0, 0.31, None)
    assert row.sentence("full") == SAID[given]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    marks: Marks = {
        ("full", None): {KEYS: [[1], [1], [0], [1]], NEEDLE: [[1]] * 4},
        ("h2o", None): {KEYS: [[1], [0], [0], [0]], NEEDLE: [[1]] * 4},
        ("tova", None): {KEYS: [[1]] * 4},
    }
    (found,) = read_results([write(tmp_path / "run", marks)])
    return found


def test_a_policy_that_lacks_a_task_is_left_out(results: Results) -> None:
    full, h2o = compared(results, "after", "full")
    assert (full.policy, h2o.policy) == ("full", "h2o")
    ours, theirs = (cell for cell in results.cells.values() if cell.name.policy != "tova")
    assert h2o.difference == difference(theirs, ours, results.columns)
    assert h2o.difference is not None
    assert h2o.difference.mean == pytest.approx(-0.25)
    for reference in ("tova", "nothing"):
        with pytest.raises(ValueError, match=f"{reference} has no score in every task"):
            compared(results, "after", reference)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks=nowhere.jsonl"], "nowhere.jsonl: No such file or directory; expected a JSONL file"),
        (["--tasks=demo/kyes"], "not asked: demo/kyes: no task matches 'demo/kyes'"),
        (["--tasks=demo/keys"], "length=None of the generated task demo/keys: expected a length in tokens"),
        (["--tasks=demo/keys", "--scorer=f1"], "--scorer 'f1' without a file: expected --tasks FILE.jsonl"),
        (["--tasks=MINE", "--scorer=f2"], "scorer 'f2': expected exact, contains, f1, rouge, or module:function"),
        (["--tasks=MINE", "--policy=h2"], "unknown policy 'h2'"),
        (["--tasks=MINE", "--policy=h2o:budget={budget}"], "without budgets: expected budgets"),
        (["--tasks=MINE", "--question=during"], "question: 'during': expected after, before or both"),
        (["--tasks=MINE", "--picture=a.txt"], "--picture a.txt: expected a file *.png, *.pdf or *.svg"),
        (["--tasks=MINE", "--picture=/no/a.png"], "/no is not a folder; expected a file in an existing folder"),
        (
            ["--tasks=longbench/qasper", "--length=64"],
            "lengths=[64], but all tasks are read from files: expected a gen",
        ),
        (["--tasks=demo/keys", "--length=0"], "lengths: 0: expected an integer >= 1"),
        (["--tasks=MINE", "--length=64"], "--length 64 with files of questions only: expected a generated task too"),
        ([], "Missing option '--tasks'"),
    ],
)
def test_what_is_wrong_is_named_before_the_model_is_loaded(more: list[str], message: str, tmp_path: Path) -> None:
    file = questions(tmp_path / "mine.jsonl")
    status, stdout, stderr = kv("compare", "demo", "--policy=full", *(one.replace("MINE", file) for one in more))
    assert (status, stdout) == (2, "")
    assert message in " ".join(stderr.replace("│", " ").split())


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    status, _, stderr = kv(*asked("--tasks=nowhere.jsonl", "--picture", tmp_path / "a.png"))
    assert status == 2
    assert "--picture needs matplotlib, which is not installed: expected pip install" in stderr


def test_a_policy_that_fails_is_an_error_and_not_a_score(tmp_path: Path) -> None:
    file = questions(tmp_path / "mine.jsonl")
    command = ("compare", "demo", "--policy=adakv:base=h2o,base.budget=40,groups=3", "--tasks", file)
    status, stdout, stderr = kv(*command)
    assert status == 1
    assert "full" in stdout
    assert "adakv" not in stdout
    assert "1 errors:" in stderr
    scorer = "--scorer=tests.evaluation.test_own_run:broken"
    status, stdout, stderr = kv("compare", "demo", "--policy=full", "--tasks", file, scorer, "--max-new-tokens=8")
    assert (status, stdout) == (2, "")
    assert "on the answer to line 1: it gives nan" in stderr
    assert stderr.splitlines()[-1].startswith("kvjax: error: no question was answered: ")


def test_eval_asks_files_beside_tasks_of_the_grid(tmp_path: Path) -> None:
    file = questions(tmp_path / "mine.jsonl")
    dry = ("eval", "--dry-run", "--limit", 2)
    status, stdout, _ = kv(*dry, "--tasks", file, "--tasks", "demo/needle", "--max-new-tokens", 5)
    assert (status, "demo/keys" in stdout) == (0, False)
    assert all(f"│ {name} " in stdout for name in ("mine", "demo/needle"))
    assert " 5 │" in stdout
    status, stdout, _ = kv(*dry, "--tasks", file)
    assert (status, "demo" in stdout) == (0, False)
    (tmp_path / "grid.yaml").write_text(f"tasks: [{{file: {file}, scorer: exact}}]\npolicies: [full]\n")
    status, stdout, _ = kv(*dry, "--config", tmp_path / "grid.yaml")
    assert (status, "│ mine " in stdout) == (0, True)
    for more, message in (
        (("--tasks", "demo/keys", "--scorer", "f1"), "--scorer 'f1' without a file: expected --tasks FILE.jsonl"),
        (("--tasks", f"{file}l"), "no task matches"),
        (("--config", "/dev/zero"), "/dev/zero is a device: expected a YAML file"),
    ):
        status, _, stderr = kv(*dry, *more)
        assert (status, message in stderr) == (2, True), stderr
