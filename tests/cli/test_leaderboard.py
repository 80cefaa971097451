"""`kvjax report --leaderboard`: its options, and a cell that its page's command repeats."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import kv
from tests.evaluation.test_leaderboard import by_name, of
from tests.evaluation.test_report import write


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = write(tmp_path / "run"), tmp_path / "board.html"
    assert kv("report", run, "--leaderboard", file) == (0, "", f"5 cells are in {file}; open it in a browser\n")
    assert file.read_text().startswith("<!doctype html>")
    assert not (run / "report").exists()
    status, stdout, stderr = kv("report", run, "--leaderboard", file, "--overwrite", "--json")
    places = json.loads(stdout)
    assert (status, places["report"], places["leaderboard"]) == (0, None, str(file)), stderr
    status, stdout, _ = kv("report", run, "--leaderboard", tmp_path / "b.html", "--out", tmp_path / "report")
    assert (status, stdout.startswith("# Made up")) == (0, True)
    assert (tmp_path / "b.html").read_text() == file.read_text()

    def read(*_: object) -> None:
        raise AssertionError("results are read")

    monkeypatch.setattr("kvjax.evaluation.report.results.read_results", read)
    for options, message in [
        (("--leaderboard", file), f"{file} exists: expected a file that does not, or --overwrite"),
        (("--beside", "a.csv"), "--beside a.csv without --leaderboard: expected both"),
        (
            ("--leaderboard", tmp_path / "new", "--beside", file),
            f"{file}, line 1: the columns <!doctype html>: expected",
        ),
        (("--leaderboard", tmp_path / "new", "--against", "full"), "--against full with --leaderboard: expected --out"),
    ]:
        status, stdout, stderr = kv("report", run, *options)
        assert (status, stdout) == (2, "")
        assert message in stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_command_gives_the_same_answers(
    shallow_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {
        "model": shallow_model,
        "tasks": [{"name": "demo/needle", "lengths": [64]}, {"name": "demo/keys", "lengths": [64]}],
        "policies": ["full", "tova:budget={budget}"],
        "budgets": [16],
        "question": "before",
        "limit": 1,
        "seed": 5,
    }
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text(json.dumps(grid))
    assert kv("eval", "--config", "grid.yaml", "--out", "run")[0] == 0
    found = by_name(of([Path("run")]))
    text, _, line = found["tova", 16]["command"].rpartition("END\n")
    subprocess.run(["bash", "-ec", f"{text}END\n"], check=True)
    assert kv(*shlex.split(line)[1:])[0] == 0

    def lines(run: str) -> list[str]:
        return [x for x in Path(run, "results.jsonl").read_text().splitlines() if '"policy": "tova"' in x]

    assert len(lines("run")) == 4  # the prompt of one task has three questions
    assert lines(line.split()[-1]) == lines("run")
