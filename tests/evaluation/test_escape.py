"""Names from data in reports: no form takes them for markup, commands or formulas."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvjax.evaluation.report import escape, page
from kvjax.evaluation.report.results import read_results
from tests.evaluation.test_report import KEYS, NEEDLE, write

HOSTILE = "<script>alert(1)</script> **b** [x](javascript:y) `c` | \\input{/etc/passwd} $x^2$ ~_z_\n# next & 50%"


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("streaming_llm:budget=24", "streaming_llm:budget=24"),
        ("_a_ __b__", "\\_a\\_ \\_\\_b\\_\\_"),
        ("a|b", "a\\|b"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("a\nb\x1b[31m", "a b \\[31m"),
        ("-3.2", "-3.2"),
    ],
)
def test_markdown(text: str, markdown: str) -> None:
    assert escape.markdown(text) == markdown


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=1+1", "'=1+1"), ("+cmd", "'+cmd"), ("-x", "'-x"), ("@x", "'@x"), (" \t=1", "'  =1"), ("-3.2", "-3.2")],
)
def test_csv(text: str, cell: str) -> None:
    assert escape.csv(text) == cell


def test_latex() -> None:
    assert escape.latex("[1ex]") == "{[}1ex]"
    assert escape.latex("\\input{x} a_b ~^") == (
        "\\textbackslash{}input\\{x\\} a\\_b \\textasciitilde{}\\textasciicircum{}"
    )


def test_a_report_of_hostile_names(tmp_path: Path) -> None:
    marks = {
        ("full", None): {KEYS: [[1, 1], [1, 0]], NEEDLE: [[1], [1]]},
        (HOSTILE, 0.5): {KEYS: [[1, 1], [1, 0]], (f"=cmd {HOSTILE}", 512): [[1], [1]]},
        ("_hidden", 0.5): {KEYS: [[1, 1], [1, 0]], NEEDLE: [[1], [1]]},
        ("_hidden", 0.2): {KEYS: [[1, 1], [1, 0]], NEEDLE: [[1], [0]]},
        ("$\\frac{", 0.5): {KEYS: [[1, 1], [1, 0]], NEEDLE: [[1], [1]]},
        ("$\\frac{", 0.2): {KEYS: [[1, 1], [1, 0]], NEEDLE: [[1], [1]]},
    }
    folder = write(tmp_path / "run", marks, model=f"=model {HOSTILE}")
    run = json.loads((folder / "run.json").read_text())
    run["grid"]["title"] = HOSTILE
    run["grid"]["policies"] = [{"policy": "full"}]
    (folder / "run.json").write_text(json.dumps(run))
    text = page.write(tmp_path / "out", read_results([folder]), ["full", HOSTILE], lambda said: None)
    assert "<script" not in text
    assert "**b**" not in text
    assert "](javascript" not in text.replace("\\](", "")
    for line in text.splitlines():
        assert not line.startswith("# next")
    for path in (tmp_path / "out").glob("*.csv"):
        for row in csv.reader(path.open()):
            assert all(cell[:1] not in "=@" or not cell for cell in row)
    for path in (tmp_path / "out").glob("*.tex"):
        assert "\\input" not in path.read_text()
