"""Tables, statistics and plots of synthetic results."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from kvjax.cli import app
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.results import CellName, Results, read_results
from kvjax.evaluation.report.statistics import (
    area,
    bootstrap,
    curve,
    difference,
    interval,
    largest_compression,
    randomization,
)
from kvjax.evaluation.report.tables import Table

KEYS, NEEDLE = ("demo/keys", 512), ("demo/needle", 512)
Marks = Mapping[tuple[str, float | None], Mapping[tuple[str, int], Sequence[Sequence[float]]]]

# policy and budget -> task -> the scores of the questions of each example
MARKS: Marks = {
    ("full", None): {KEYS: [[1, 1], [1, 1], [1, 1]], NEEDLE: [[1], [1]]},
    ("snapkv", 0.5): {KEYS: [[1, 1], [1, 1], [1, 0]], NEEDLE: [[1], [1]]},
    ("snapkv", 0.1): {KEYS: [[1, 0], [0, 0], [1, 0]], NEEDLE: [[1], [0]]},
    ("h2o", 0.5): {KEYS: [[1, 1], [0, 0], [1, 0]], NEEDLE: [[1], [0]]},
    ("h2o", 0.1): {KEYS: [[0, 0], [0, 0], [0, 0]], NEEDLE: [[0], [0]]},
}


def write(folder: Path, marks: Marks = MARKS, question: str = "after", model: str = "demo", **facts: Any) -> Path:
    folder.mkdir()
    policies = [{"policy": policy} for policy in dict.fromkeys(policy for policy, _ in marks)]
    grid = {"model": model, "title": "Made up", "policies": policies}
    header = {"grid": grid, "model": {"bytes_per_token": 100, "layers": 2}}
    (folder / "run.json").write_text(json.dumps(header))
    lines, timings = [], []
    for (policy, budget), tasks in marks.items():
        about: dict[str, Any] = {"policy": policy, "budget": budget, "question": question}
        share = 1.0 if budget is None else budget
        for (task, length), examples in tasks.items():
            for i, scores in enumerate(examples):
                for asked, score in enumerate(scores):
                    line: dict[str, Any] = about | {"task": task, "length": length, "id": f"{i}", "asked": asked}
                    line |= {"scores": {"exact_match": score}, "text": policy, "tokens": [1] * 12, "meta": {}}
                    line |= {"prompt_tokens": 488, "compressed_tokens": 400, "kept": [500 * share, 300 * share]}
                    lines.append(line | {"kv_bytes": 7, "kv_bytes_end": int(50_000 * share)} | facts)
        took = {"read_seconds": 2.0, "ask_seconds": 1.0, "decode_seconds": 4.0, "decoded_tokens": 80}
        timings.append(about | took | {"prompts": 2, "answers": 4})
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "timings.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in timings))
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (found,) = read_results([write(tmp_path / "run")])
    return found


def test_policies_stand_in_the_order_of_the_grid(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(sorted(lines, key=lambda line: '"h2o"' not in line)))
    (found,) = read_results([folder])
    assert found.policies == ("full", "snapkv", "h2o")
    assert [name.budget for name in found.cells] == [None, 0.5, 0.1, 0.5, 0.1]


def test_scores_are_means_of_answers_and_averages_means_of_tasks(results: Results) -> None:
    half, tenth = tables.scores(results, "after")
    assert (half.name, tenth.name) == ("scores_after_0.5", "scores_after_0.1")
    assert half.headings == ("policy", "needle", "keys", "avg.")
    assert half.rows == (
        ("full", "100.0", "100.0", "100.0"),
        ("snapkv", "100.0", "83.3", "91.7"),
        ("h2o", "50.0", "50.0", "50.0"),
    )
    assert half.bold() == {(1, 1), (1, 2), (1, 3)}  # the full cache is excluded
    assert tenth.rows[1:] == (("snapkv", "50.0", "33.3", "41.7"), ("h2o", "0.0", "0.0", "0.0"))


def column(table: tables.Table, heading: str) -> list[str]:
    """The cells under a heading."""
    at = table.headings.index(heading)
    return [row[at] for row in table.rows]


def test_intervals_stay_within_what_scores_can_be(tmp_path: Path) -> None:
    marks: Marks = {
        ("full", None): {KEYS: [[1]] * 5},
        ("h2o", 0.5): {KEYS: [[1]] * 5 + [[0]]},
        ("tova", 8): {KEYS: [[1]]},
    }
    (found,) = read_results([write(tmp_path / "run", marks)])
    rows = {row[0]: row[1:] for row in tables.averages(found, "after").rows}
    assert rows["full"] == ("100.0 (100.0 to 100.0)",) * 2
    assert rows["h2o"] == ("", "83.3 (50.0 to 100.0)")
    assert rows["tova"] == ("100.0", "")
    tidy = list(csv.reader(io.StringIO(tables.means(found).csv())))
    assert tidy == [
        ["policy", "budget", "question", "task", "length", "mean", "low", "high", "n"],
        ["full", "", "after", "demo/keys", "512", "100.0", "100.0", "100.0", "5"],
        ["h2o", "0.5", "after", "demo/keys", "512", "83.333333", "50.0", "100.0", "6"],
        ["tova", "8", "after", "demo/keys", "512", "100.0", "", "", "1"],
    ]


def test_the_pandas_of_the_page_reads_the_tidy_file(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    text = (Path(__file__).parents[2] / "docs" / "guide" / "reports.md").read_text()
    (code,) = re.findall(r"```python\n(import pandas.*?)```", text, re.DOTALL)
    folder = tmp_path / "runs" / "demo" / "report"
    folder.mkdir(parents=True)
    (folder / "means.csv").write_text(tables.means(results).csv())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    first = names["worst"].iloc[0]
    assert (first.policy, first.budget, first.lost, len(names["worst"])) == ("h2o", 0.1, 100, 10)


def test_equal_numbers_are_not_bold() -> None:
    assert Table("t", "", ("policy", "a"), (("x", "0.0"), ("y", "0.0")), best=(1,)).bold() == set()


def test_forms_of_a_table() -> None:
    table = Table("t", "50 % kept", ("policy", "a_b"), (("full", "90.0"), ("x|y", "80.0"), ("z", "")), (1,), apart=1)
    assert table.markdown().splitlines()[2:] == [
        "| policy | a_b |", "|---|---:|", "| full | 90.0 |", "| x\\|y | 80.0 |", "| z |  |",
    ]  # fmt: skip
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["policy", "a_b"],
        ["full", "90.0"],
        ["x|y", "80.0"],
        ["z", ""],
    ]
    latex = table.latex()
    assert "full & 90.0 \\\\\n\\midrule\nx|y & 80.0 \\\\" in latex
    assert "policy & a\\_b \\\\" in latex
    assert "\\caption{50 \\% kept}" in latex


def test_one_task_shows_all_of_its_scores(tmp_path: Path) -> None:
    marks: Marks = {("full", None): {KEYS: [[1, 1]]}, ("snapkv", 64): {KEYS: [[1, 0]]}}
    (found,) = read_results([write(tmp_path / "run", marks, scores={"completion": 0.5, "once": 0.25})])
    (table,) = tables.scores(found, "after")
    assert table.headings == ("policy", "completion", "once")
    assert table.rows[1] == ("snapkv", "50.0", "25.0")
    assert table.title == "demo, 64 entries, question unknown while compressing"


def test_compression_is_what_was_not_kept(results: Results) -> None:
    assert [cell.compression for cell in results.of("snapkv", "after")] == [0.5, 0.9]
    points = curve(results, "snapkv", "after")
    assert [round(point.compression, 9) for point in points] == [0.0, 0.5, 0.9]
    np.testing.assert_allclose([point.accuracy.mean for point in points], [1, 11 / 12, 5 / 12])
    by_hand = (0.5 * (1 + 11 / 12) / 2 + 0.4 * (11 / 12 + 5 / 12) / 2) / 0.9
    assert area(points) == pytest.approx(by_hand)
    assert area(points[:1]) is None


def test_compression_at_a_tolerance_is_where_the_loss_first_exceeds_it(results: Results) -> None:
    # losses of snapkv: 0 at 0, 1/12 at 0.5, 7/12 at 0.9
    expected = {0.05: 0.5 * 0.05 * 12, 1 / 12: 0.5, 0.2: 0.5 + 0.4 * (0.2 - 1 / 12) / 0.5, 0.6: 0.9}
    for tolerance, compression in expected.items():
        assert largest_compression(results, "snapkv", "after", tolerance) == pytest.approx(compression)
    assert largest_compression(results, "h2o", "after", 0.1) == pytest.approx(0.5 * 0.1 / 0.5)


def test_intervals_are_those_of_scipy(tmp_path: Path) -> None:
    """With one question per example, the bootstrap of clusters equals the ordinary bootstrap."""
    scores = (np.random.default_rng(0).random(60) < 0.6).astype(float)
    (found,) = read_results([write(tmp_path / "run", {("full", None): {KEYS: [[x] for x in scores]}})])
    ours = interval(found.cells[CellName("full", None, "after")], (KEYS,))
    theirs = stats.bootstrap((scores,), np.mean, method="percentile", n_resamples=5000, rng=0).confidence_interval
    assert ours is not None
    assert ours.mean == pytest.approx(scores.mean())
    np.testing.assert_allclose([ours.low, ours.high], theirs, atol=0.02)


def test_answers_to_one_text_are_drawn_together() -> None:
    """Twenty texts with ten equal answers each are as certain as twenty answers, not as two hundred."""
    texts = (np.arange(20) % 2).astype(float)
    together = bootstrap([np.stack([10 * texts, np.full(20, 10.0)], axis=1)])
    single = bootstrap([np.stack([texts, np.ones(20)], axis=1)])
    assert together.std() == pytest.approx(single.std())
    assert together.std() == pytest.approx(0.5 / 20**0.5, rel=0.1)


def test_differences_are_paired(results: Results, tmp_path: Path) -> None:
    cells = {name[:2]: cell for name, cell in results.cells.items()}
    found = difference(cells["h2o", 0.5], cells["snapkv", 0.5], [KEYS])
    assert found is not None
    assert found.mean == pytest.approx(-2 / 6)
    assert np.isnan(found[1:]).all()  # three examples show nothing of the spread
    assert [row[2:] for row in tables.comparison(results, "after", "snapkv").rows][1] == ("-41.7", "", "")
    always: Marks = {("a", 0.5): {KEYS: [[1], [0.5]] * 2}, ("b", 0.5): {KEYS: [[0.5], [0]] * 2}}
    (pair,) = read_results([write(tmp_path / "pair", always)])
    a, b = pair.cells.values()
    assert difference(a, b, [KEYS]) == (0.5, 0.5, 0.5, 2 / 2**4)  # four examples, exchanged in every way
    assert difference(a, a, [KEYS]) == (0, 0, 0, 1)


@pytest.mark.parametrize("examples", [5, 9, 40])
def test_p_values_are_those_of_scipy(examples: int) -> None:
    """Of one question per example, by all exchanges or by drawn ones. Equal differences count."""
    rng = np.random.default_rng(examples)
    one, other = (rng.integers(5, size=examples) / 4 for _ in range(2))
    theirs = stats.permutation_test(
        (one, other), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=20_000, rng=0
    )
    ours = randomization(*([np.stack([scores, np.ones(examples)], axis=1)] for scores in (one, other)))
    assert ours == pytest.approx(theirs.pvalue, abs=1e-9 if examples < 10 else 0.03)


def test_costs(results: Results) -> None:
    rows = {row[:2]: row[2:] for row in tables.costs(results, "after").rows}
    assert rows["snapkv", "50 % kept"] == ("50.0", "0.025", "0.500", "12", "", "20")  # one prefill serves both budgets
    assert rows["full", "no budget"] == ("100.0", "0.05", "1.000", "12", "2.5", "20")


def test_the_share_of_a_full_cache_counts_the_answers_that_both_gave(tmp_path: Path) -> None:
    marks: Marks = {("full", None): {KEYS: [[1], [1]]}, ("h2o", 0.5): {KEYS: [[1], [1], [1]]}}
    (found,) = read_results([write(tmp_path / "run", marks)])
    assert column(tables.costs(found, "after"), "of full") == ["1.000", "0.500"]
    (alone,) = read_results([write(tmp_path / "alone", {("h2o", 0.5): {KEYS: [[1]]}})])
    assert column(tables.costs(alone, "after"), "of full") == [""]


def test_published_results_have_no_lengths_of_answers(tmp_path: Path) -> None:
    (found,) = read_results([write(tmp_path / "run", tokens=[])])
    assert set(column(tables.costs(found, "after"), "tokens per answer")) == {""}


def test_a_full_cache_that_reserves_nothing_has_no_share(tmp_path: Path) -> None:
    (found,) = read_results([write(tmp_path / "run", kv_bytes_end=0)])
    assert set(column(tables.costs(found, "after"), "of full")) == {""}


def test_kvcompose_tables_have_a_column_for_each_setting_and_model(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a"), write(tmp_path / "b", question="before"), write(tmp_path / "c", model="other")]
    loose, strict, areas = tables.robustness(read_results(folders))
    assert areas.headings == ("policy", "after, demo", "after, other", "before, demo", "avg.")
    assert [row[0] for row in areas.rows] == ["snapkv", "h2o"]
    assert (loose.name, strict.name) == ("compression_at_20", "compression_at_10")
    assert strict.rows[1] == ("h2o", "10.0", "10.0", "10.0", "10.0")


def test_the_command_writes_a_page_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib (the extra `plot`)")
    one, two = write(tmp_path / "one"), write(tmp_path / "two", question="before")
    result = CliRunner().invoke(app, ["report", str(one), str(two), "--against", "h2o"])
    assert result.exit_code == 0, result.output
    out = one / "report"
    page = (out / "report.md").read_text()
    assert result.stdout == page
    assert page.startswith("# Made up\n\n80 answers of demo under 3 policies, 2 tasks. `after`: question unknown")
    for text in ("| snapkv | 50 % kept | +41.7 |", "Area under the", "![Accuracy against compression](curves.png)"):
        assert text in page
    names = {path.name for path in out.iterdir()}
    assert {
        "means.csv",
        "scores_after_0.5.csv",
        "scores_before_0.1.tex",
        "area.csv",
        "against_h2o_after.csv",
    } <= names
    for name in ("curves.png", "layers_after.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "needles_after.png" not in names
    again = CliRunner().invoke(app, ["report", str(one)])
    assert again.exit_code == 2
    assert "report is not empty, it holds" in again.stderr
    assert "or overwrite=True (--overwrite)" in again.stderr
    (out / "notes.csv").write_text("mine")
    assert CliRunner().invoke(app, ["report", str(one), "--overwrite"]).exit_code == 0
    assert {path.name for path in out.iterdir()} < {*names, "notes.csv"}  # no table of the first report is left
    marks: Marks = {("full", None): {("needle/11", length): [[1], [0.5]] for length in (1000, 2000)}}
    needles = write(tmp_path / "needles", marks, meta={"depth": 50, "length": 900})
    assert CliRunner().invoke(app, ["report", str(needles), "--out", str(tmp_path / "map")]).exit_code == 0
    assert (tmp_path / "map" / "needles_after.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (
            lambda folder: (folder / "run.json").unlink(),
            [],
            "has no run.json: expected a folder that kvjax eval wrote",
        ),
        (
            lambda folder: (folder / "results.jsonl").write_text('{"a": '),
            [],
            "results.jsonl, line 1: it is incomplete or no JSON",
        ),
        (lambda folder: (folder / "results.jsonl").write_text(""), [], "no answer of demo has a score"),
        (
            lambda folder: None,
            ["--against", "tova"],
            "policy 'tova' is not in the results: expected one of full, snapkv, h2o",
        ),
        (lambda folder: None, ["--against", "snapvk"], "; did you mean snapkv?"),
    ],
)
def test_what_cannot_be_reported_is_one_error(tmp_path: Path, spoil: Any, options: list[str], message: str) -> None:
    folder = write(tmp_path / "run")
    spoil(folder)
    result = CliRunner().invoke(app, ["report", str(folder), *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_policies_that_the_grid_no_longer_has_come_last_and_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    run["grid"]["policies"] = [policy for policy in run["grid"]["policies"] if policy != {"policy": "snapkv"}]
    (folder / "run.json").write_text(json.dumps(run))
    (found,) = read_results([folder])
    assert (found.policies, found.dropped) == (("full", "h2o", "snapkv"), ("snapkv",))
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert "The grid no longer asks snapkv; the report has their earlier answers." in result.stdout
