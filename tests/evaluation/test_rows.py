"""One row per answer: its columns and values, in each of the forms that it is written in."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvjax.checks import installs
from kvjax.evaluation.report.results import Results, read_results
from kvjax.evaluation.report.rows import COLUMNS, rows, write_csv, write_parquet
from tests.cli.commands import kv
from tests.evaluation.test_report import KEYS, Marks, write

MARKS: Marks = {("full", None): {KEYS: [[1, 0], [1, 1]]}, ("snapkv", 0.5): {KEYS: [[0.5, 0], [1, 1]]}}
FACTS: dict[str, Any] = {
    "question_text": "\n\nwho ?",
    "prediction": "=1+1\nor 2",
    "answers": ["2", "two"],
    "meta": {"line": 3},
}
KINDS = {"text": str, "integer": int, "number": float, "texts": list}


def made(folder: Path, **facts: Any) -> Results:
    write(folder, MARKS, **facts)
    asked = [["demo/keys", 512, "0", i] for i in (0, 1)]
    took = [json.loads(line) | {"questions": asked} for line in (folder / "timings.jsonl").read_text().splitlines()]
    (folder / "timings.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in took))
    (found,) = read_results([folder])
    return found


def test_a_row_has_what_is_known_of_an_answer(tmp_path: Path) -> None:
    found = list(rows(made(tmp_path / "run", **FACTS)))
    assert len(found) == 8
    assert found[4] == {
        "model": "demo",
        "policy": "snapkv",
        "budget": 0.5,
        "policy_text": "snapkv",
        "question_position": "after",
        "task": "demo/keys",
        "length": 512,
        "id": "0",
        "asked": 0,
        "line": 3,
        "prompt_tokens": 488,
        "compressed_tokens": 400,
        "kept_tokens": 200.0,  # the mean of 250 and 150, of two layers
        "question": "who ?",
        "answer": "=1+1\nor 2",
        "expected": ["2", "two"],
        "scorer": "exact_match",
        "score": 0.5,
        "cache_bytes": 25_000,
        "seconds": 1.25,  # of asking and decoding four answers
        "generated_tokens": 12,
    }
    assert [row["seconds"] for row in found[4:]] == [1.25, 1.25, None, None]  # nobody knows the batch of the others
    assert all(list(row) == list(COLUMNS) for row in found)
    for row in found:
        assert all(value is None or type(value) is KINDS[COLUMNS[name]] for name, value in row.items())


def test_answers_of_earlier_versions_lack_some_values(tmp_path: Path) -> None:
    row = next(rows(made(tmp_path / "run", scores={})))
    assert [name for name, value in row.items() if value is None] == [
        *("budget", "line", "question", "answer", "expected", "scorer", "score")
    ]


def test_csv_has_every_text_and_no_formula(tmp_path: Path) -> None:
    results = made(tmp_path / "run", **FACTS)
    assert write_csv(tmp_path / "a.csv", [results]) == 8
    with (tmp_path / "a.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert (found[0]["answer"], found[0]["expected"], found[0]["budget"]) == ("'=1+1\nor 2", '["2", "two"]', "")
    for read, row in zip(found, rows(results), strict=True):
        for name in COLUMNS.keys() - {"answer", "expected"}:
            assert read[name] == ("" if row[name] is None else str(row[name])), name


def test_csv_has_a_carriage_return_within_its_cell(tmp_path: Path) -> None:
    results = made(tmp_path / "run", **FACTS | {"prediction": "a\rb", "answers": ["\r\n"]})
    write_csv(tmp_path / "a.csv", [results])
    with (tmp_path / "a.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [one["answer"] for one in found] == ["a\rb"] * 8
    assert (tmp_path / "a.csv").read_bytes().count(b"\n") == 9


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow (the extra `table`)")
    results = made(tmp_path / "run", **FACTS)
    assert write_parquet(tmp_path / "a.parquet", [results, results]) == 16
    found = parquet.read_table(tmp_path / "a.parquet")
    assert found.to_pylist() == list(rows(results, results))
    assert {str(field.type) for field in found.schema} == {"string", "int64", "double", "list<element: string>"}
    with pytest.raises(ValueError, match=r"the results are damaged: .*; expected those that kvjax eval wrote"):
        write_parquet(tmp_path / "b.parquet", [made(tmp_path / "odd", prompt_tokens=10**40)])


def test_parquet_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    made(tmp_path / "run")
    status, _, stderr = kv("report", tmp_path / "run", "--parquet", tmp_path / "a.parquet")
    assert (status, stderr) == (
        2,
        f"kvjax: error: Parquet needs pyarrow, which is not installed: expected {installs('table')}\n",
    )
    assert not (tmp_path / "a.parquet").exists()


def test_the_command_writes_what_is_asked(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "a.csv"
    made(run)
    assert kv("report", run, "--csv", file) == (0, "", f"8 answers are in {file}\n")
    assert not (run / "report").exists()
    status, _, stderr = kv("report", run, "--csv", file)
    assert (status, stderr) == (2, f"kvjax: error: {file} exists: expected a file that does not, or --overwrite\n")
    status, _, stderr = kv("report", run, "--csv", tmp_path / "b.csv", "--against", "full")
    assert (status, stderr) == (
        2,
        "kvjax: error: --against full with --csv: expected --out, the folder of the report\n",
    )
    status, stdout, _ = kv("report", run, "--csv", file, "--out", tmp_path / "report", "--overwrite")
    assert (status, stdout.startswith("# Made up")) == (0, True)
    assert (tmp_path / "report" / "means.csv").exists()
