"""A published run: what stays, what is left out, and that reports of it are those of the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import publish_run
from kvjax.evaluation.report import leaderboard
from kvjax.evaluation.report.results import read_results
from tests.evaluation.test_report import KEYS, write
from tests.evaluation.test_runner import GRID, plan, right
from tests.evaluation.test_runner import run as evaluate

OTHERS = ("ruler/qa_1", 4096)  # a task whose texts are not kvjax's
SECRET = {"prediction": "a long secret", "question_text": "whose secret?", "answers": ["a secret"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    marks = {("full", None): {KEYS: [[1], [1]], OTHERS: [[1], [0]]}, ("snapkv", 0.5): {KEYS: [[1], [0]]}}
    folder = write(tmp_path / "run", marks, model=str(Path.home() / "models" / "some.gguf"), **SECRET)
    (folder / "prompts.json").write_text(json.dumps({json.dumps([*KEYS, "0"]): [["text "], ["question"]]}))
    return folder


def test_texts_of_others_are_left_out(run: Path, tmp_path: Path) -> None:
    publish_run.main(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "run.json",
        "results.jsonl.gz",
        "timings.jsonl.gz",
        "prompts.json.gz",
    }
    lines = [
        json.loads(line) for line in gzip.decompress((tmp_path / "out" / "results.jsonl.gz").read_bytes()).splitlines()
    ]
    assert len(lines) == 6
    for line in lines:
        shown = line["task"] == KEYS[0]
        assert line["tokens"] == []
        assert {name: line[name] for name in SECRET if name in line} == (SECRET if shown else {})
    assert str(Path.home()) not in (tmp_path / "out" / "run.json").read_text()


def test_reports_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    publish_run.main(run, tmp_path / "out")
    (theirs,), (ours,) = read_results([tmp_path / "out"]), read_results([run])
    assert theirs.model == ours.model == "~/models/some.gguf"
    assert theirs.prompts == ours.prompts != {}
    for name, cell in ours.cells.items():
        assert theirs.cells[name].timings == cell.timings
        for column in ours.columns:
            assert theirs.cells[name].scores(column) == cell.scores(column)
    boards = [leaderboard.board(read_results([folder])) for folder in (run, tmp_path / "out")]
    means = [[cell["mean"] for cell in board["cells"]] for board in boards]
    assert means[0] == means[1]
    (joined,) = read_results([tmp_path / "out", run])  # the same model, wherever somebody's home is
    assert len(joined.cells) == len(ours.cells)


def test_a_run_goes_on_from_a_published_one(tmp_path: Path) -> None:
    """After gunzip, also under another name of the home folder."""
    grid = GRID.but(model=str(Path.home() / "model"), data=str(Path.home() / "data"))
    whole = evaluate(plan(grid), right, tmp_path / "run")
    publish_run.main(tmp_path / "run", tmp_path / "out")
    for path in (tmp_path / "out").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    again = evaluate(plan(grid), right, tmp_path / "out")
    assert (whole.new, again.new, again.planned) == (whole.planned, 0, whole.planned)
    with pytest.raises(ValueError, match="expected the same value or another folder"):
        evaluate(plan(grid.but(model=str(Path.home() / "other"))), right, tmp_path / "out")


def test_a_published_run_is_the_same_every_time(run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        publish_run.main(run, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_prompts_and_homes_stay_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one's own questions, and those that a benchmark puts among the facts of its examples."""
    home = str(Path.home())
    marks = {
        (f"duo_attention:gates={home}/gates", None): {("questions", None): [[1]], ("longwriter/write", None): [[1]]}
    }
    meta = {"line": 1, "length": 100, "prompt": "a secret", "checks_once": {"1": "a secret"}}
    folder = write(tmp_path / "run", marks, meta=meta, **SECRET)
    prompts = {json.dumps(["questions", None, "line 1"]): [["a secret"]], json.dumps([*KEYS, "0"]): [["text "]]}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    publish_run.main(folder, tmp_path / "out")
    found = b"".join(
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in (tmp_path / "out").iterdir()
    ).decode()
    assert ("secret" in found, f"{home}/" in found) == (False, False)
    (results,) = read_results([tmp_path / "out"])
    (cell,) = results.cells.values()
    assert (cell.name.policy, len(cell.timings)) == ("duo_attention:gates=~/gates", 1)
    assert cell.lines[0]["meta"] == {"line": 1, "length": 100}
    assert list(results.prompts) == [json.dumps([*KEYS, "0"])]
