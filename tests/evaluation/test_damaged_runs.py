"""Run folders that were damaged: `eval` repairs what a kill leaves, `report` names the file and the line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.evaluation.lines import checked_scores
from kvjax.evaluation.report import leaderboard, page
from kvjax.evaluation.report.results import read_results
from kvjax.evaluation.runner import Silent
from tests.evaluation.test_report import write
from tests.evaluation.test_runner import plan, right, run

RESULTS, TIMINGS = "results.jsonl", "timings.jsonl"


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("torn", ['{"policy": "full", "bud', '{"policy": "full"}\n', "[1]\n", "\x00\n"])
def test_torn_timings_are_dropped_and_the_run_goes_on(tmp_path: Path, torn: str) -> None:
    run(plan(), right, tmp_path)
    timings, results = (tmp_path / TIMINGS).read_text(), (tmp_path / RESULTS).read_text()
    (tmp_path / TIMINGS).write_text(timings + torn)
    (tmp_path / RESULTS).write_text(results[: len(results) // 2])
    heard = Heard()
    assert run(plan(), right, tmp_path, heard).new > 0
    assert (tmp_path / RESULTS).read_text() == results
    assert (tmp_path / TIMINGS).read_text().startswith(timings)
    number = len(timings.splitlines()) + 1
    assert f"{TIMINGS}, line {number} of {number}: it" in heard.said[-1]
    assert heard.said[-1].endswith("its times are lost")
    assert len(read_results([tmp_path])) == 1


def edited(change: dict[str, Any], drop: str = "") -> Callable[[str], str]:
    return lambda line: json.dumps({k: v for k, v in (json.loads(line) | change).items() if k != drop}) + "\n"


@pytest.mark.parametrize(
    ("name", "edit", "problem"),
    [
        (RESULTS, edited({}, drop="scores"), "it has no scores"),
        (RESULTS, edited({"scores": {"exact_match": float("nan")}}), "it is incomplete or no JSON"),
        (RESULTS, edited({"scores": [1]}), r"its scores is \[1\]: expected an object of finite numbers"),
        (RESULTS, edited({"scores": {"exact_match": "1"}}), "its scores is {'exact_match': '1'}: expected an object"),
        (RESULTS, edited({"kept": []}), r"its kept is \[\]: expected a list of numbers >= 0"),
        (RESULTS, edited({"compressed_tokens": 0}), "its compressed_tokens is 0: expected a number >= 1"),
        (RESULTS, edited({"compressed_tokens": 10**400}), "its compressed_tokens is 1000.*: expected a number >= 1"),
        (RESULTS, edited({"question": "later"}), "its question is 'later': expected one of after, before"),
        (RESULTS, edited({"policy": None}), "its policy is None: expected a text"),
        (RESULTS, edited({"id": [1]}), r"its id is \[1\]: expected a text, a number or null"),
        (RESULTS, edited({"meta": "x" * 99}), r"its meta is 'x{56}\.\.\.: expected an object"),
        (RESULTS, edited({"error": 3}), "its error is 3: expected a text"),
        (RESULTS, lambda line: line[:-1] + "}\n", "it is incomplete or no JSON"),
        (RESULTS, lambda line: "[" * 100_000 + "\n", "it is incomplete or no JSON"),
        (RESULTS, lambda line: "3\n", "it is incomplete: expected a JSON object and a line end"),
        (TIMINGS, lambda line: line[:9], "it is incomplete or no JSON"),
        (TIMINGS, edited({"answers": 0}), "its answers is 0: expected a number >= 1"),
        (TIMINGS, edited({}, drop="decode_seconds"), "it has no decode_seconds"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, name: str, edit: Callable[[str], str], problem: str) -> None:
    path = write(tmp_path / "run") / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], edit(lines[2]), *lines[3:]]))
    with pytest.raises(ValueError, match=f"^{path}, line 3: {problem}.*; kvjax eval repairs it$"):
        read_results([tmp_path / "run"])


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run") / RESULTS
    packed, whole = path.with_name(f"{RESULTS}.gz"), path.read_bytes()
    path.unlink()
    for content in (gzip.compress(whole)[:-20], whole):
        packed.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{packed} is damaged: gzip cannot read it"):
            read_results([tmp_path / "run"])
    packed.write_bytes(gzip.compress(whole + b"{"))
    with pytest.raises(ValueError, match=f"^{packed}, line .*: it is incomplete or no JSON"):
        read_results([tmp_path / "run"])


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("{", r"it is no JSON \(Expecting"),
        ("[]", "expected an object with the objects grid and model"),
        ('{"grid": {}}', "expected an object with the objects grid and model"),
        ('{"grid": {"model": "demo"}, "model": {}}', "expected the texts model and title in grid"),
        ('{"grid": {"model": "demo", "title": "", "policies": ["full"]}, "model": {}}', "expected policies in grid"),
        (
            '{"grid": {"model": "demo", "title": "", "policies": [{"policy": "full"}]}, "model": {}}',
            "expected bytes_per_token in model, a number >= 1",
        ),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: str, problem: str) -> None:
    (write(tmp_path / "run") / "run.json").write_text(header)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'run' / 'run.json'} is damaged: {problem}"):
        read_results([tmp_path / "run"])
    run(plan(), right, tmp_path / "other")
    (tmp_path / "other" / "run.json").write_text(header)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'other' / 'run.json'} is damaged: {problem}"):
        run(plan(), right, tmp_path / "other")


def reported(folder: Path, out: Path | None) -> str | None:
    """The message of the error of a report; None if there is none."""
    try:
        found = read_results([folder])
        leaderboard.page(leaderboard.board(found))
        if out is not None:
            page.write(out, found, (), lambda said: None)
    except ValueError as error:
        return str(error)
    return None


def damage(folder: Path, rng: np.random.Generator) -> Path:
    """Flips a bit of a file of a run, or cuts a piece out of it, and returns the file."""
    path = folder / (RESULTS, TIMINGS, "run.json")[int(rng.integers(3))]
    data = bytearray(path.read_bytes())
    place = int(rng.integers(len(data)))
    if rng.random() < 0.5:
        data[place] ^= 1 << int(rng.integers(8))
    else:
        del data[place : place + int(rng.integers(1, 40))]
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_random_damage_is_one_error_or_a_report(tmp_path: Path) -> None:
    rng, errors = np.random.default_rng(0), 0
    folder = write(tmp_path / "run")
    for i in range(300):
        copy = shutil.copytree(folder, tmp_path / f"{i}")
        path = damage(copy, rng)
        problem = reported(copy, tmp_path / f"report{i}" if i % 30 == 0 else None)
        if problem is not None:
            errors += 1
            assert "\n" not in problem
            assert str(path) in problem or "no answer of" in problem
        shutil.rmtree(copy)
    assert 100 < errors < 300


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "1", None, True])
def test_a_metric_that_gives_no_number(score: Any) -> None:
    with pytest.raises(ValueError, match="expected an object of finite numbers"):
        checked_scores({"exact_match": score})


@pytest.mark.parametrize(("text", "problem"), [("{", "it is no JSON"), ('{"a": [1]}', "expected an object of lists")])
def test_damaged_prompts_are_named(tmp_path: Path, text: str, problem: str) -> None:
    run(plan(), right, tmp_path)
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(ValueError, match=f"prompts.json is damaged: {problem}"):
        read_results([tmp_path])
