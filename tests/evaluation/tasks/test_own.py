"""Files of questions become tasks, and a wrong line is one error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.scorers import scorer
from kvjax.evaluation.tasks.own import OwnTask, read_tasks, tasks_of
from kvjax.evaluation.tasks.task import DataError, Source

GOOD = {"context": "a b", "question": "what ?", "answers": ["a"]}


def read(path: Path, *lines: Any) -> tuple[OwnTask, ...]:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return read_tasks(path, scorer("exact"), 8)


def test_questions_of_a_context_are_one_example(tmp_path: Path) -> None:
    found = read(
        tmp_path / "mine.jsonl",
        GOOD,
        b"  ",
        GOOD | {"question": "who ?\u2028", "answers": "b"},
        GOOD | {"task": "other"},
        GOOD | {"max_new_tokens": 3},
        GOOD | {"context": "c"},
    )
    assert [task.name for task in found] == ["mine", "other"]
    mine, other = ([*task.examples(Source())] for task in found)
    assert [(one.id, one.context, one.new_tokens) for one in mine] == [
        ("line 1", "a b", None),
        ("line 5", "a b", 3),
        ("line 6", "c", None),
    ]
    assert [(q.text, q.answers, q.meta) for q in mine[0].questions] == [
        ("\n\nwhat ?", ("a",), {"line": 1}),
        ("\n\nwho ?\u2028", ("b",), {"line": 3}),
    ]
    assert [one.id for one in other] == ["line 4"]
    assert {task.new_tokens for task in found} == {8}
    assert {**found[0].fixed, "sha256": ""} == {
        "file": str(tmp_path / "mine.jsonl"),
        "sha256": "",
        "scorer": "exact",
        "max_new_tokens": 8,
    }


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    (task,) = read(tmp_path / "mine.jsonl", b"\xef\xbb\xbf" + line + b"\r", line + b"\r")
    assert [len(one.questions) for one in task.examples(Source())] == [2]


WRONG: dict[str, tuple[Any, str]] = {
    "not JSON": (b'{"context": ', "'{\"context\": ' is no JSON (Expecting value"),
    "not an object": (["a"], "['a']: expected a JSON object with the fields context, question and answers, and opt"),
    "null": (b"null", "None: expected a JSON object"),
    "nested": (b"[" * 100_000, "is no JSON (maximum recursion"),
    "twice": (b'{"context": "a", "context": "b"}', "is no JSON (it has 'context' twice)"),
    "not UTF-8": (b'{"context": "\xff"}', "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 13"),
    "surrogate": (b'{"context": "\\ud800", "question": "q", "answers": "a"}', "context='\\ud800': expected a text wi"),
    "missing": ({"context": "a", "answers": ["b"]}, "question is missing: expected the fields context, question and"),
    "unknown": (GOOD | {"answer": "a"}, "'answer' is an unknown field: expected context, .*; did you mean answers?"),
    "context": (GOOD | {"context": 5}, "context=5: expected a text that is not blank"),
    "blank": (GOOD | {"context": " \n"}, "context=' \\n': expected a text that is not blank"),
    "question": (GOOD | {"question": None}, "question=None: expected a text that is not blank"),
    "no answers": (GOOD | {"answers": []}, "answers=[]: expected a text, or a list of at least one, none of which is"),
    "empty answer": (GOOD | {"answers": ["a", ""]}, "answers=['a', '']: expected a text, or a list"),
    "number as answer": (GOOD | {"answers": [3]}, "answers=[3]: expected a text, or a list"),
    "task": (GOOD | {"task": ""}, "task='': expected a text that is not blank"),
    "known task": (GOOD | {"task": "demo/keys"}, "task='demo/keys' is the name of another task: expected a name of"),
    "zero": (GOOD | {"max_new_tokens": 0}, "max_new_tokens=0: expected an integer in 1 .. 16,777,216"),
    "true": (GOOD | {"max_new_tokens": True}, "max_new_tokens=True: expected an integer in 1"),
    "not a number": (b'{"context":"a","question":"b","answers":"c","max_new_tokens":NaN}', "max_new_tokens=nan: exp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line(case: str, tmp_path: Path) -> None:
    line, message = WRONG[case]
    with pytest.raises(DataError) as found:
        read(tmp_path / "mine.jsonl", GOOD, line)
    text, (start, _, rest) = str(found.value), message.partition(".*")
    assert text.startswith(f"{tmp_path / 'mine.jsonl'}, line 2")
    assert start in text
    assert text.endswith(rest)
    assert len(text) < 600
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", b"", "has no line: expected a JSON object per line"),
        ("blank", b" \n\n", "has no line: expected a JSON object per line"),
        ("folder", None, "Is a directory; expected a JSONL file"),
        ("nothing", None, "No such file or directory; expected a JSONL file"),
        ("/dev/zero", None, "/dev/zero is a device: expected a JSONL file"),
    ],
)
def test_a_file_without_questions(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name == "folder":
        path.mkdir()
    with pytest.raises(DataError, match=message):
        read_tasks(path, scorer("exact"), 8)


@pytest.mark.parametrize("name", ["rouge", "f1"])
def test_rouge_would_score_0_without_latin_letters(name: str, tmp_path: Path) -> None:
    if name == "rouge":
        pytest.importorskip("rouge_score", reason="ROUGE needs rouge-score (the extra `eval`)")
    lines = [GOOD | {"answers": texts} for texts in (["北京", "Beijing"], "7", "北京")]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if name == "f1":
        assert [len(task.given) for task in read_tasks(path, scorer(name), 8)] == [1]
        return
    with pytest.raises(
        DataError, match="line 3: answers='北京': the scorer rouge reads Latin letters and digits alone;"
    ):
        read_tasks(path, scorer(name), 8)


def test_a_list_of_questions() -> None:
    (task,) = tasks_of([GOOD, GOOD | {"question": "who ?"}], scorer("f1"), 8)
    assert (task.name, task.fixed["file"], task.fixed["scorer"]) == ("questions", None, "f1")
    (other,) = tasks_of([GOOD], scorer("f1"), 8)
    assert task.fixed["sha256"] != other.fixed["sha256"]
    with pytest.raises(DataError, match="questions, line 2: question=5: expected a text that is not blank"):
        tasks_of([GOOD, GOOD | {"question": 5}], scorer("f1"), 8)
    with pytest.raises(DataError, match=r"questions, line 1: 'a': expected a mapping with the fields context, quest"):
        tasks_of(["a"], scorer("f1"), 8)  # type: ignore[list-item]
