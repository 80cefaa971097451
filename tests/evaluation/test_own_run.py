"""Runs over questions of one's own: beside other tasks, continued, and refused if the questions have changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.tasks.vocabulary import tokenizer
from tests.evaluation.test_runner import lines, plan, right, run

CONTEXTS = [f"the code of {name} is lamp . the code of julia is {name} ." for name in ("adam", "alan", "alice", "amir")]


def questions(path: Path, **fields: Any) -> str:
    """A file with two questions about each of four contexts, which alternate."""
    asked = [
        {"context": context, "question": f"recall what the code of {name} is :", "answers": "lamp"} | fields
        for name in ("julia", "adam")
        for context in CONTEXTS
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in asked))
    return str(path)


def grid(tasks: Any, **changes: Any) -> Grid:
    return Grid.of({"tasks": tasks, "policies": ["full", "tova:budget=0.5"], "question": "both"} | changes)


def found(tasks: Any, only: Sequence[str] | None = None, **changes: Any) -> list[Item]:
    items = list(read_items(grid(tasks, **changes), tokenizer(), 512, only))
    assert not [item for item in items if isinstance(item, Refusal)]
    return [item for item in items if isinstance(item, Item)]


def test_a_file_is_asked_beside_other_tasks(tmp_path: Path) -> None:
    path = questions(tmp_path / "mine.jsonl")
    mixed = [path, {"name": "demo/needle", "lengths": 128, "limit": 2}]
    names = [item.task.name for item in found(mixed)]
    assert names == ["mine"] * 4 + ["demo/needle"] * 2
    assert {item.task.name for item in found(mixed, [path])} == {"mine"}
    assert {item.task.name for item in found(mixed, ["mine"])} == {"mine"}
    assert {item.task.name for item in found(mixed, ["demo/n*"])} == {"demo/needle"}
    assert len(found({"file": path, "limit": 3})) == 3
    with pytest.raises(ValueError, match=r"no task matches 'mien': .*; did you mean mine\?"):
        found(mixed, ["mien"])


def test_options_of_a_file(tmp_path: Path) -> None:
    path = questions(tmp_path / "mine.jsonl")
    item, *_ = found({"file": path, "scorer": "contains", "max_new_tokens": 5})
    assert (item.task.fixed["scorer"], item.new_tokens) == ("contains", 5)
    assert found(path, new_tokens=7)[0].new_tokens == 7
    own = questions(tmp_path / "own.jsonl", max_new_tokens=3)
    assert {item.new_tokens for item in found({"file": own, "max_new_tokens": 5})} == {3}
    (line,) = grid(path).with_files([path], "exact").tasks
    assert (line.file, line.scorer) == (path, "exact")
    for wrong, message in (
        ({"file": path, "scorer": "f2"}, "tasks: scorer: scorer 'f2': expected exact"),
        ({"file": path, "lengths": 5}, "lengths: unknown field of the entry with file: .* expected file, scorer, max"),
        ({"file": 5}, "tasks: file: 5: expected a string"),
        ({"file": path, "max_new_tokens": 0}, "max_new_tokens: 0: expected an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            grid(wrong)


def test_the_chat_template_is_that_of_the_grid(tmp_path: Path) -> None:
    path, words = questions(tmp_path / "mine.jsonl"), tokenizer()
    words.chat_template = "{% for m in messages %}the {{ m.content }} .{% endfor %} one :"
    item = next(one for one in read_items(grid(path, chat=True), words, 512) if isinstance(one, Item))
    assert words.decode(item.context).split()[:4] == ["the", "the", "code", "of"]
    assert words.decode(item.questions[0]).split()[-3:] == [".", "one", ":"]


def test_tasks_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, other = questions(tmp_path / "mine.jsonl"), questions(tmp_path / "b" / "mine.jsonl")
    with pytest.raises(ValueError, match=r"the task 'mine' of .*b/mine\.jsonl has the name of another task: expected"):
        found([one, other])
    assert len(found([one, one])) == 4


def test_a_run_continues_with_the_same_questions_only(tmp_path: Path) -> None:
    path, out = questions(tmp_path / "mine.jsonl"), tmp_path / "out"

    def ready(*tasks: Any, **changes: Any) -> Any:
        asked = grid([*tasks], **changes)
        return plan(asked, list(read_items(asked, tokenizer(), 512)))

    half = {"file": path, "limit": 2}
    assert (run(ready(half), right, out).new, run(ready(path), right, out).new) == (16, 16)
    whole = tmp_path / "whole"
    run(ready(path), right, whole)
    assert (whole / "results.jsonl").read_bytes() == (out / "results.jsonl").read_bytes()
    line = lines(out)[0]
    assert (line["id"], line["meta"], line["question_text"]) == (
        "line 1",
        {"line": 1},
        "\n\nrecall what the code of julia is :",
    )
    moved = tmp_path / "b" / "mine.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(Path(path).read_bytes())
    assert run(ready(str(moved)), right, out).new == 0
    other = {"name": "demo/needle", "lengths": 64, "limit": 1}
    run(ready(other), right, out)  # does not forget what the other answers belong to
    moved.write_bytes(Path(path).read_bytes().replace(b"lamp", b"sword"))
    before = (out / "results.jsonl").read_bytes(), (out / "run.json").read_bytes()
    for wrong, message in (
        (
            str(moved),
            "out holds answers to other questions of the task 'mine', with the SHA-256 .* expected the same q",
        ),
        (
            {"file": path, "scorer": "exact"},
            "scorer='exact' of the task 'mine', but .*out holds answers with scorer='f1'",
        ),
        ({"file": path, "max_new_tokens": 5}, "max_new_tokens=5 of the task 'mine', but"),
    ):
        with pytest.raises(ValueError, match=message):
            run(ready(wrong), right, out)
    assert before == ((out / "results.jsonl").read_bytes(), (out / "run.json").read_bytes())


def broken(prediction: str, answers: list[str]) -> float:
    return float("nan")


def test_a_score_that_is_none_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    asked = grid({"file": questions(tmp_path / "mine.jsonl"), "scorer": f"{__name__}:broken"})
    summary = run(plan(asked, list(read_items(asked, tokenizer(), 512))), right, tmp_path / "out")
    assert (summary.answers, len(summary.errors)) == (0, 32)
    assert "on the answer to line 5: it gives nan; expected a number in [0, 1]" in summary.errors[1]
