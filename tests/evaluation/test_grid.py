"""A grid becomes cells, and a wrong grid is refused with an error that names the problem."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.entries import Cell
from kvjax.evaluation.grid import Grid

LEAST: dict[str, Any] = {"tasks": ["demo/*"], "policies": ["full"]}


def test_cells_are_policies_by_budgets_by_settings() -> None:
    grid = Grid.of(
        {
            "tasks": "demo/*",
            "policies": [
                "full",
                "snapkv:budget={budget}",
                {"policy": "duo_attention:sparsity={removed}", "name": "Duo", "budgets": [0.3]},
                {"policy": "h2o:budget={budget},every=4", "budgets": 64},
                {"policy": "scissorhands:budget={entries}", "budgets": [0.1, 0.29], "tokens": 500},
            ],
            "budgets": [0.5, 0.1],
            "question": "both",
        }
    )
    expected: list[tuple[str, float | None, str]] = [
        ("full", None, "full"),
        ("snapkv", 0.5, "snapkv:budget=0.5"),
        ("snapkv", 0.1, "snapkv:budget=0.1"),
        ("Duo", 0.3, "duo_attention:sparsity=0.7"),
        ("h2o:every=4", 64, "h2o:budget=64,every=4"),
        ("scissorhands", 0.1, "scissorhands:budget=50"),
        ("scissorhands", 0.29, "scissorhands:budget=145"),
    ]
    assert list(grid.cells()) == [
        Cell(label, budget, question, text) for label, budget, text in expected for question in ("after", "before")
    ]


def test_a_file_and_changes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("tasks: [{name: demo/keys, lengths: 256, limit: 5}, demo/needle]\npolicies: full\nmesh: [2, 4]\n")
    grid = Grid.read(path)
    assert (grid.tasks[0].lengths, grid.tasks[0].limit, grid.tasks[1].limit, grid.mesh) == ((256,), 5, None, (2, 4))
    changed = grid.but(model="other", batch=None, limit=3)
    assert (changed.model, changed.batch, changed.limit) == ("other", grid.batch, 3)
    assert [line.limit for line in changed.limited(3).tasks] == [3, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "model: 3: expected a string"),
        ({"polices": ["full"]}, "polices: unknown field of a run; expected tasks, policies.*; did you mean policies"),
        ({"policies": ["snapvk"]}, "policies: snapvk: unknown policy 'snapvk': did you mean snapkv"),
        ({"tasks": []}, "tasks is missing"),
        ({"tasks": [{"length": 3}]}, "expected a string, or a mapping with the fields name, lengths, limit"),
        ({"tasks": [{"name": "demo/*", "size": 3}]}, "tasks: size: unknown field of the entry with name: 'demo/.'"),
        ({"tasks": [{"name": "demo/*", "limit": 0}]}, "tasks: limit: 0: expected an integer >= 1"),
        (
            {"policies": ["snapkv:budget={budget}"]},
            "without budgets: expected budgets, a list of shares or numbers of entries",
        ),
        ({"budgets": [1.5]}, r"budgets: 1.5: expected a share of the prompt in \(0, 1\], such as 0.5"),
        (
            {"policies": [{"policy": "duo_attention:sparsity={removed}", "budgets": 64}]},
            "expected a share of the prompt",
        ),
        (
            {"policies": ["scissorhands:budget={entries}"], "budgets": 0.5},
            "without tokens: expected tokens, the length of the prompt that",
        ),
        ({"policies": ["full", "full"]}, "the policy and budget occur twice"),
        ({"question": "during"}, "question: 'during': expected after, before or both"),
        ({"sampler": "hot"}, "'hot' in sampler 'hot' is not understood"),
        ({"mesh": "2x4"}, r"mesh: '2x4': expected two integers >= 1, data and model, such as \[2, 4\]"),
        ({"memory_gb": 0}, "memory_gb: 0: expected a number > 0"),
        ({"judge": {"url": "http://localhost"}}, "judge: .* expected a mapping with url and model; all fields are url"),
        ({"chat": "yes"}, "chat: 'yes': expected true or false"),
        (
            {"policies": ["full", "morphk:budget=40"]},
            "policies: morphk:budget=40: unknown policy 'morphk': did you",
        ),
        (
            {"policies": ["h2o:budget={budget}"], "budgets": [0.5, 10**8]},
            "budgets: 100000000: expected a share .* from 1 to 16,777,216",
        ),
        ({"tasks": [{"name": "demo/*", "lengths": [10**12]}]}, "lengths: 1000000000000: expected an integer <= 16,777"),
        ({"limit": 10**12}, "limit: 1000000000000: expected an integer <= 1,000,000"),
        ({"question": [["after"]]}, r"question: \[\['after'\]\]: expected after, before or both"),
        ({"memory_gb": float("inf")}, "memory_gb: inf: expected a number > 0"),
        ({"memory_gb": float("nan")}, "memory_gb: nan: expected a number > 0"),
        (
            {"budgets": [0.5, 0.25]},
            r"budgets: \[0.5, 0.25\]: no policy takes them; expected one such as snapkv:budget=",
        ),
        (
            {"policies": [{"policy": "snapkv", "budgets": 0.5}]},
            r"policies: budgets: 0.5 of 'snapkv': expected {budget}",
        ),
        (
            {"policies": [{"policy": "snapkv:budget={budget}", "tokens": 9}], "budgets": 0.5},
            r"policies: tokens: 9 of 'snapkv:budget={budget}': expected {entries} in the policy",
        ),
        ({"judge": {"url": 5, "model": "m"}}, "judge: url: 5: expected a string"),
        ({"judge": {"url": "u", "model": "m", "tries": 0}}, "judge: tries: 0: expected an integer >= 1"),
        ({"judge": {"url": "u", "model": "m", "timeout": "9"}}, "judge: timeout: '9': expected a number >= 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid.of(LEAST | changes)


BOMB = "\n".join(  # of nine levels, each of which stands for nine of the one before
    [
        "a: &a [x,x,x,x,x,x,x,x,x]",
        *(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")),
    ]
)


def test_files_that_are_no_grid(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, message in (
        ("tasks: [", "is not YAML"),
        ("- 3", r"run.yaml: \[3\]: expected a mapping with the fields tasks, "),
        ("[" * 30 + "]" * 30, "is not YAML: expected at most 20 nested levels"),
        ("[" * 100_000, "is not YAML: expected at most 20 nested levels"),
        (BOMB, "is not YAML: expected at most 20 aliases"),
        ("tasks: demo/*\npolicies: full\nlimit: 5\nlimit: 50\n", r"is not YAML: 'limit' occurs twice\n.*line 4"),
        ("tasks: [{name: demo/*, limit: 5, limit: 50}]\npolicies: full\n", "is not YAML: 'limit' occurs twice"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Grid.read(path)


def test_merged_fields_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("tasks: [&a {name: demo/keys, limit: 5}, {<<: *a, name: demo/needle}]\npolicies: full\n")
    assert [(line.name, line.limit) for line in Grid.read(path).tasks] == [("demo/keys", 5), ("demo/needle", 5)]
