"""The leaderboard: its numbers, the commands that repeat its cells, and a page in which nothing of the data runs."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.entries import SETTINGS
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.header import prompt_key
from kvjax.evaluation.report.families import KINDS, families
from kvjax.evaluation.report.leaderboard import board, page
from kvjax.evaluation.report.repeating import command, of_cell
from kvjax.evaluation.report.results import CellName, read_results
from kvjax.evaluation.report.statistics import difference, interval
from kvjax.evaluation.tasks import registry
from tests.evaluation.test_report import KEYS, NEEDLE, Marks, write

HOSTILE = '</script><img src=x onerror=alert(1)><!-- \u2028 " \\'
FOUR: Marks = {
    ("full", None): {KEYS: [[1, 1], [1, 1], [1, 1], [1, 1]], NEEDLE: [[1], [1], [1], [0]]},
    ("snapkv", 0.5): {KEYS: [[1, 1], [0, 0], [1, 0], [1, 0]], NEEDLE: [[1], [1], [0], [0]]},
    ("h2o", 0.5): {KEYS: [[1, 1], [1, 0], [1, 0], [1, 0]], NEEDLE: [[0], [1], [0], [0]]},
    ("snapkv", 64): {KEYS: [[1, 1], [0, 0], [1, 0], [1, 0]]},
}
TASKS = [{"name": "demo/*", "lengths": [512]}]


def made(folder: Path, marks: Marks = FOUR, **facts: Any) -> dict[str, Any]:
    return of([write(folder, marks, **facts)])


def of(folders: list[Path], *published: Any) -> dict[str, Any]:
    return json.loads(json.dumps(board(read_results(folders), published), allow_nan=False))


def by_name(found: dict[str, Any]) -> dict[tuple[str, Any], dict[str, Any]]:
    return {(found["policies"][cell["policy"]]["name"], cell["budget"]): cell for cell in found["cells"]}


def with_grid(folder: Path, **grid: Any) -> Path:
    """Completes the grid of a run."""
    header = json.loads((folder / "run.json").read_text())
    header["grid"] |= {"tasks": TASKS, "question": ["after"]} | grid
    (folder / "run.json").write_text(json.dumps(header))
    return folder


def test_numbers_are_those_of_the_report(tmp_path: Path) -> None:
    found = made(tmp_path / "run")
    assert found["benchmarks"] == [{"name": "demo, 512 tokens", "tasks": ["needle", "keys"]}]
    assert [model["name"] for model in found["models"]] == ["demo"]
    cells = by_name(found)
    (results,) = read_results([tmp_path / "run"])
    own, full = (results.cells[CellName(name, budget, "after")] for name, budget in (("snapkv", 0.5), ("full", None)))
    cell = cells["snapkv", 0.5]
    expected = {"mean": interval(own, (NEEDLE, KEYS)), "difference": difference(own, full, (NEEDLE, KEYS))}
    for name, values in expected.items():
        assert values is not None
        assert cell[name] == pytest.approx([100 * x for x in values[:3]], abs=0.01)
    assert (cell["mean"][0], cell["difference"][0]) == (50, -37.5)  # of 2/4 and 4/8; of -1/4 and -4/8
    assert [task[0] for task in cell["tasks"]] == [50, 50]
    assert [task[3] for task in cell["tasks"]] == [4, 4]
    assert [task[4] for task in cell["tasks"]] == [-25, -50]
    assert (cell["removed"], cell["dropped"], cell["prompts"], cell["asked"]) == (50, 50, 8, 2)
    assert (cell["bytes"], cell["of_full"], cell["kept"]) == (25_000, 50, [250, 150])
    assert {name: one["rank"] for name, one in cells.items()} == {
        ("full", None): None, ("snapkv", 0.5): 1, ("h2o", 0.5): 2, ("snapkv", 64): None,
    }  # fmt: skip
    assert (cells["full", None]["full"], cells["full", None]["difference"], cell["full"]) == (True, None, False)


def test_equal_means_have_equal_ranks(tmp_path: Path) -> None:
    thirds: Marks = {(name, 0.5): {KEYS: [[x] for x in scores]} for name, scores in
                     {"a": (1, 0, 0), "b": (0, 0, 1), "c": (1, 1, 1), "d": (0, 0, 0)}.items()}  # fmt: skip
    cells = by_name(made(tmp_path / "run", thirds))
    assert [cells[name, 0.5]["rank"] for name in "abcd"] == [2, 2, 1, 4]


def test_a_policy_without_a_placeholder_has_the_budget_of_its_text(tmp_path: Path) -> None:
    texts = ("snapkv:budget=0.25", "adakv:base=h2o,base.budget=0.25", "tova:budget=64", "gone:budget=0.25", "full")
    marks: Marks = {(text, None): {KEYS: [[1]]} for text in texts}
    found = [(cell["budget"], cell["removed"], cell["rank"]) for cell in made(tmp_path / "run", marks)["cells"]]
    assert found == [(0.25, 75, 1), (0.25, 75, 1), (64, None, 1), (None, None, None), (None, 0, None)]


def test_what_is_missing_is_null(tmp_path: Path) -> None:
    """A task, the full cache, prompts for an interval, a share, and texts that earlier versions did not record."""
    cells = by_name(made(tmp_path / "run"))
    partial = cells["snapkv", 64]
    assert (partial["mean"], partial["difference"], partial["tasks"][0]) == (None, None, None)
    assert (partial["removed"], partial["tasks"][1][0]) == (None, 50)
    assert partial["example"]["answer"] is None
    few: Marks = {("snapkv", 0.5): {KEYS: [[1], [0], [0]]}}
    found = made(tmp_path / "few", few)
    (cell,) = found["cells"]
    assert (cell["mean"], cell["difference"], cell["of_full"]) == ([33.33, None, None], None, None)
    assert cell["tasks"] == [[33.33, None, None, 3, None, None, None]]
    assert cell["command"] is None  # its grid has no task


def test_each_model_and_length_has_means_of_its_own(tmp_path: Path) -> None:
    long = ("demo/keys", 1024)
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b", {("full", None): {KEYS: [[1]]}, ("h2o", 0.5): {KEYS: [[0]]}}, model="b"),
        write(tmp_path / "c", {("h2o", 0.5): {long: [[1], [0]]}}, question="before"),
    ]
    found = of(folders)
    assert [one["name"] for one in found["models"]] == ["demo", "b"]
    assert found["title"] == "Made up"
    assert found["benchmarks"] == [
        {"name": "demo, 512 tokens", "tasks": ["needle", "keys"]},
        {"name": "demo, 1,024 tokens", "tasks": ["keys"]},
    ]
    means = {(c["model"], c["benchmark"], c["question"], c["budget"]): c["mean"] for c in found["cells"] if c["rank"]}
    assert means[0, 0, "after", 0.5] == [50, None, None]
    assert means[1, 0, "after", 0.5] == [0, None, None]
    assert means[0, 1, "before", 0.5] == [50, None, None]
    assert [cell["tasks"][0] for cell in found["cells"] if cell["model"] == 1] == [None, None]
    with_grid(folders[0], title="Another")
    assert of(folders)["title"] == "Leaderboard: demo, 512 tokens; demo, 1,024 tokens"


def test_the_example_is_the_first_answer_that_is_worse(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", question_text="x" * 500 + "?", answers=["a"] * 7, prediction="b" * 500)
    found = of([folder])
    cells = by_name(found)
    worse, same = (cells[name]["example"] for name in (("h2o", 0.5), ("full", None)))
    asked = found["asked"][worse["asked"]]
    assert (asked["task"], asked["id"], worse["lost"], worse["score"]) == ("demo/needle", "1", True, 0)
    assert (asked["end"][:3], len(asked["end"]), asked["end"][-1]) == ("… x", 402, "?")
    assert (asked["expected"], asked["more"]) == (["a"] * 5, 2)
    assert (worse["answer"], worse["full"]) == ("b" * 400 + " …",) * 2
    assert (worse["tokens"], worse["kept"]) == (488, 200)
    assert (found["asked"][same["asked"]]["id"], same["lost"], same["full"]) == ("0", False, None)


def test_nothing_of_the_data_is_markup(tmp_path: Path) -> None:
    marks: Marks = {
        ("full", None): {(f"demo/{HOSTILE}", 512): [[1]]},
        (HOSTILE, 0.5): {(f"demo/{HOSTILE}", 512): [[0]]},
    }
    folder = write(tmp_path / "run", marks, model=HOSTILE, prediction=HOSTILE, question_text=HOSTILE, answers=[HOSTILE])
    found = of([folder])
    text = page(found)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == found
    assert found["cells"][1]["example"]["answer"] == HOSTILE
    assert "<" not in data
    assert text.count("<script") == text.count("</script") == 2
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert way not in text
    assert re.findall(r"https?:[^\"' ]*|\bsrc=|\bhref=|@import|url\(", text.replace(data, "")) == [
        "http://www.w3.org/2000/svg"  # the name of SVG, which is not fetched
    ]
    assert "default-src 'none'" in text


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_the_data_is_json(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page({"cells": [number]})


GRID: dict[str, Any] = {
    "model": "a model's/folder",
    "data": "data",
    "title": "Made up",
    "tasks": [
        {"name": "ruler/*", "lengths": [1024, 4096], "limit": 3},
        {"name": "demo/keys", "lengths": [4096]},
        {"name": "demo/needle", "lengths": [64]},
    ],
    "policies": [
        "full",
        {"policy": "snapkv:budget={budget},kernel=5", "name": f"snapkv\nEND\n{HOSTILE} $(touch owned) `touch owned`"},
        {"policy": "streaming_llm:budget={entries}", "tokens": 4096, "name": "window"},
    ],
    "budgets": [0.5, 0.25],
    "question": "both",
    "limit": 7,
    "chat": True,
    "seed": 3,
    "batch": 4,
    "mesh": [1, 2],
    "judge": {"url": "http://localhost:8000/v1", "model": "judge 'é'"},
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("question", SETTINGS)
def test_a_command_repeats_a_cell(place: int, question: str, tmp_path: Path) -> None:
    """A shell runs it, with a program that writes down its arguments in place of kvjax."""
    grid = Grid.of(GRID)
    label, budget = grid.policies[place].label, None if place == 0 else 0.25
    (cell,) = [c for c in grid.cells() if (c.label, c.budget, c.question) == (label, budget, question)]
    columns = [(f"ruler/{name}", 4096) for name in ("cwe", "vt")]
    text = command(grid.document(), CellName(label, budget, question), columns)
    assert text is not None
    (tmp_path / "kvjax").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > arguments\n')
    (tmp_path / "kvjax").chmod(0o755)
    subprocess.run(["bash", "-ec", text], cwd=tmp_path, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    first, *arguments = (tmp_path / "arguments").read_text().splitlines()
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (first, set(options)) == ("eval", {"--config", "--model", "--data", "--out"})
    assert {path.name for path in tmp_path.iterdir()} == {"kvjax", "arguments", options["--config"]}
    again = Grid.read(tmp_path / options["--config"]).but(model=options["--model"], data=options["--data"])
    assert again == of_cell(grid.document(), CellName(label, budget, question), columns)
    assert again.cells() == (cell,)
    assert [(line.name, line.lengths, line.limit) for line in again.tasks] == [
        ("ruler/vt", (4096,), 3),
        ("ruler/cwe", (4096,), 3),
    ]
    kept = ("model", "data", "limit", "chat", "seed", "batch", "mesh", "judge", "dtype", "sampler", "ends")
    assert all(getattr(again, name) == getattr(grid, name) for name in kept)


def test_a_command_keeps_a_pattern_whose_tasks_are_all_asked() -> None:
    grid = Grid.of({**GRID, "tasks": [{"name": "demo/*", "lengths": [64, 512]}]})
    columns = [(task.name, 512) for task in registry.find("demo/*")]
    found = of_cell(grid.document(), CellName("full", None, "after"), columns)
    assert found is not None
    assert [(line.name, line.lengths) for line in found.tasks] == [("demo/*", (512,))]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, CellName("h2o", 0.5, "after")),
        ({}, CellName("window", 0.125, "after")),
        ({"question": "after"}, CellName("full", None, "before")),
        ({"tasks": [{"name": "demo/keys", "lengths": [4096]}]}, CellName("full", None, "after")),
        ({"tasks": 3}, CellName("full", None, "after")),
        ({"later": 1}, CellName("full", None, "after")),
        ({"model": "a loaded model"}, CellName("full", None, "after")),
    ],
)
def test_no_command_is_better_than_a_wrong_one(changes: dict[str, Any], name: CellName) -> None:
    run = {**GRID, "policies": [{"policy": "full"}, {"policy": "gone"}, {"policy": "h2o"}]} | changes
    assert command(run, name, [("ruler/cwe", 4096)]) is None


def test_a_command_repeats_all_tasks_of_a_cell_or_none() -> None:
    """The last grid of a folder may ask fewer tasks than an earlier one."""
    columns = [("ruler/cwe", 4096), ("ruler/vt", 4096)]
    fewer = Grid.of({**GRID, "tasks": [{"name": "ruler/vt", "lengths": [4096]}]}).document()
    assert command(fewer, CellName("full", None, "after"), columns[1:]) is not None
    assert command(fewer, CellName("full", None, "after"), columns) is None


def test_a_policy_that_is_gone_hides_no_other_command(tmp_path: Path) -> None:
    folder = with_grid(write(tmp_path / "run"), budgets=[0.5, 0.1])
    header = json.loads((folder / "run.json").read_text())
    header["grid"]["policies"] = [{"policy": "gone:budget={budget}"}, {"policy": "full"}]
    (folder / "run.json").write_text(json.dumps(header))
    commands = {name: cell["command"] is not None for name, cell in by_name(of([folder])).items()}
    assert [name for name, there in commands.items() if there] == [("full", None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", ()),
        ("no such policy", ()),
        ("knorm:budget=0.5", (KINDS[0],)),
        ("snapkv:budget=0.5", (KINDS[1],)),
        ("tova:budget=64", (KINDS[2], "decoding evicts")),
        ("kvzip:budget=0.5", (KINDS[4], "layers or heads share a budget", "the prompt is read twice")),
        ("kvmerger:budget=0.5", (KINDS[5], "entries merge")),
        ("adakv:base=h2o,base.budget=64", (KINDS[6], "decoding evicts", "layers or heads share a budget")),
        (
            "fastkvzip:budget=0.5",
            (KINDS[3], "layers or heads share a budget", "trained gates or measured statistics"),
        ),
    ],
)
def test_families_follow_from_the_policy(text: str, expected: tuple[str, ...]) -> None:
    assert families(text) == expected


def test_a_large_board_is_small(tmp_path: Path) -> None:
    """Ten cells of a policy, with texts as long as they may be, take less than a 60th of 3 MB."""
    tasks = [(task.name, 4096) for task in registry.find("ruler/*")]
    shares = (0.75, 0.5, 0.25, 0.125, 0.0625)
    marks: Marks = {("snapkv", share): {task: [[1], [0], [0], [1]] for task in tasks} for share in shares}
    text = "x" * 1000
    facts = {"prediction": text, "question_text": text, "answers": [text], "kept": [1234.56] * 24}
    asked = {"tasks": [{"name": "ruler/*", "lengths": [4096]}], "budgets": list(shares)}
    asked["policies"] = [{"policy": "snapkv:budget={budget}"}]
    folders = [
        with_grid(write(tmp_path / question, marks, question=question, **facts), **asked, question=[question])
        for question in SETTINGS
    ]
    found = of(folders)
    assert len(found["cells"]) == 10
    assert None not in [cell["command"] for cell in found["cells"]]
    assert len(page(found)) - len(page({})) < 3e6 / 60


def test_the_example_has_its_prompt_and_what_was_retained(tmp_path: Path) -> None:
    """The one whose tokens were recorded is taken, although an earlier answer is worse than the full cache's too."""
    folder = write(tmp_path / "run", FOUR)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if (line["task"], line["id"]) == (KEYS[0], "2"):
            line["retained"] = "0590"
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pieces = [["a ", "text ", "of ", "words"], [" one"], [HOSTILE]]
    (folder / "prompts.json").write_text(json.dumps({prompt_key(*KEYS, "2"): pieces}))
    found = of([folder])
    example = by_name(found)["snapkv", 0.5]["example"]
    assert (example["retained"], example["lost"], example["score"]) == ("0590", True, 0)
    asked = found["asked"][example["asked"]]
    assert (asked["id"], asked["pieces"]) == ("2", [*pieces[0], HOSTILE])
    assert HOSTILE not in page(found)
    (folder / "prompts.json").unlink()
    example = by_name(of([folder]))["snapkv", 0.5]["example"]
    assert example["retained"] is None


def test_the_page_does_not_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = with_grid(write(tmp_path / "run", FOUR), model=str(tmp_path / "a model"), data=str(tmp_path / "data"))
    found = of([folder])
    assert found["models"][0]["name"] == "~/a model"
    assert "--model ~/'a model' --data ~/data" in found["cells"][0]["command"]
    header = json.loads((folder / "run.json").read_text())
    header["grid"] |= {
        "gates": [str(tmp_path / "gates")],
        "policies": [{"policy": f"headkv:importance={tmp_path}/i.json"}],
    }
    (folder / "run.json").write_text(json.dumps(header))
    assert str(tmp_path) not in json.dumps(of([folder]))
