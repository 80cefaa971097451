"""YAML to cells, and what is wrong with a YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.grid import Cell, Grid

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
                {"policy": "scissorhands:budget={entries}", "budgets": 0.1, "tokens": 505},
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
        ({"model": 3}, "model: 3: accepted is a text"),
        ({"polices": ["full"]}, "a run has no polices; accepted are tasks, policies"),
        ({"tasks": []}, "tasks is missing"),
        ({"tasks": [{"length": 3}]}, "accepted is a text, or a mapping with name, lengths, limit"),
        ({"tasks": [{"name": "demo/*", "size": 3}]}, "tasks: an entry with name: 'demo/.' has no size"),
        ({"tasks": [{"name": "demo/*", "limit": 0}]}, "tasks: limit: 0: accepted is an integer >= 1"),
        ({"policies": ["snapkv:budget={budget}"]}, "needs budgets, a list of shares or entries; none are given"),
        ({"budgets": [1.5]}, r"budgets: 1.5: accepted is a share of the prompt in \(0, 1\], as 0.5"),
        ({"policies": [{"policy": "duo_attention:sparsity={removed}", "budgets": 64}]}, "takes a share of the prompt"),
        ({"policies": ["scissorhands:budget={entries}"], "budgets": 0.5}, "needs tokens, the length of a prompt that"),
        ({"policies": ["full", "full"]}, "the same policy and budget twice"),
        ({"question": "during"}, "question: 'during': accepted are after, before and both"),
        ({"sampler": "hot"}, "'hot' in sampler 'hot' is not understood"),
        ({"mesh": "2x4"}, r"mesh: '2x4': accepted are two integers >= 1, data and model, as \[2, 4\]"),
        ({"memory_gb": 0}, "memory_gb: 0: accepted is a number above 0"),
        ({"judge": {"url": "http://localhost"}}, "judge: .* accepted is a mapping with url and model, and any of url"),
        ({"chat": "yes"}, "chat: 'yes': accepted are true and false"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid.of(LEAST | changes)


def test_files_that_are_no_grid(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, message in (("tasks: [", "is not YAML"), ("- 3", r"run.yaml: a run is a mapping of tasks, .*\[3\]")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Grid.read(path)
