"""The registry, the checks of examples, and the reader of data files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from kvjax.evaluation.tasks import demo, registry
from kvjax.evaluation.tasks.files import DataFile, Record, examples
from kvjax.evaluation.tasks.task import DataError, Example, Fault, Question, Source
from kvjax.evaluation.tasks.vocabulary import decode, encode


def test_tasks_are_found_by_name() -> None:
    assert {task.name for task in registry.find("demo/*")} == {f"demo/{name}" for name in demo.TASKS}
    assert [task.name for task in registry.find(["demo/needles", "demo/need*"])] == ["demo/needles", "demo/needle"]
    assert registry.find("*") == tuple(registry.TASKS.values())
    with pytest.raises(
        ValueError,
        match=r"no task matches 'ruler/niah_singel_1': expected a task of .*; did you mean ruler/niah_single_1",
    ):
        registry.find("ruler/niah_singel_1")
    with pytest.raises(ValueError, match=r"no task matches 'xyz': expected a task of demo/\*, .*ruler/\*"):
        registry.find(["demo/*", "xyz"])


@pytest.mark.parametrize("task", registry.find("demo/*"), ids=lambda task: task.name)
def test_demo_tasks_are_texts_of_their_length_with_several_questions(task) -> None:
    found = list(task.examples(Source(length=512, count=3)))
    assert list(task.examples(Source(length=512, count=2))) == found[:2]
    assert len({example.context for example in found}) == len({example.id for example in found}) == 3
    for example in found:
        assert 1 <= len(example.questions) <= 4
        context = encode(example.context)
        for question in example.questions:
            ids = encode(example.context + question.text)
            assert ids.size == 512
            assert np.array_equal(ids[: context.size], context)
            (answer,) = question.answers
            assert set(answer.split()) <= set(decode(ids).split())
            assert task.metric(answer, question) == {"exact_match": 1}
            assert task.metric(f"{answer} {answer}", question) == {"exact_match": 0}


def test_overall_is_the_mean_over_the_answers_that_have_a_score() -> None:
    (task,) = registry.find("demo/keys")
    assert task.overall([{"a": 1, "b": 0.5}, {"a": 0}, {"a": 0.5, "c": 1}]) == {"a": 0.5, "b": 0.5, "c": 1}
    assert task.overall([]) == {}


def test_what_cannot_be_asked_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="question 'Q': expected a text that ends with its opening 'A:'"):
        Question("Q", ("x",), "A:")
    with pytest.raises(ValueError, match="an empty question"):
        Question("", ("x",))
    with pytest.raises(ValueError, match="example 3 has no context"):
        Example("3", "", (Question("Q", ("x",)),))
    with pytest.raises(ValueError, match="example 3 has no questions"):
        Example("3", "text", ())


def make(record: Record) -> Example:
    question = Question(record.text("question"), record.texts("answers"), meta={"n": record.integer("n")})
    return Example(record.text("id"), record.text("context"), (question,))


def test_a_bad_line_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    good = {"id": "1", "context": "c", "question": "q", "answers": ["a"], "n": 1}
    bad = [
        ('{"id": ', "is not JSON"),
        ("[1]", "is a list; expected a JSON object"),
        ("[" * 200_000, "is not JSON: "),
        (
            json.dumps({k: v for k, v in good.items() if k != "context"}),
            ": field 'context' is missing; expected a string",
        ),
        (json.dumps(good | {"context": " "}), ": field 'context' is empty"),
        (json.dumps(good | {"context": None}), ": field 'context' is null; expected a string"),
        (json.dumps(good | {"answers": []}), ": field 'answers' is empty; expected a list of at least one string"),
        (json.dumps(good | {"answers": "a"}), ": field 'answers' is a string; expected a list of at least one string"),
        (json.dumps(good | {"n": True}), ": field 'n' is a boolean; expected an integer"),
        (json.dumps(good), ": id '1' is also the id of one/two.jsonl, line 1"),
    ]
    (tmp_path / "one").mkdir()
    lines = [json.dumps(good), "", *(line for line, _ in bad), json.dumps(good | {"id": "2"})]
    (tmp_path / "one" / "two.jsonl").write_text("\n".join(lines))
    first, *faults, last = examples(DataFile("one/two.jsonl").lines(Source(folder=tmp_path)), make)
    assert isinstance(first, Example)
    assert isinstance(last, Example)
    assert last.id == "2"
    for i, (fault, (_, reason)) in enumerate(zip(faults, bad, strict=True), 3):
        assert isinstance(fault, Fault)
        assert fault.id == f"one/two.jsonl, line {i}"
        assert fault.reason.startswith(f"one/two.jsonl, line {i}{reason if reason[0] == ':' else f' {reason}'}")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": "\xff"}\n')
    (fault,) = examples(DataFile("a.jsonl").lines(Source(folder=tmp_path)), make)
    assert fault.reason.startswith("a.jsonl, line 1 is not JSON: 'utf-8' codec can't decode")


def test_files_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/x.jsonl", '{"a": 1}\n')
        files.writestr("data/more_x.jsonl", "{}")

    def download(repository: str, name: str, *, repo_type: str) -> str:
        assert (repository, repo_type) == ("who/what", "dataset")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    file = DataFile("what/x.jsonl", "who/what", "data.zip")
    assert file.lines(Source()) == [("what/x.jsonl, line 1", b'{"a": 1}')]
    (tmp_path / "plain.jsonl").write_text('{"b": 2}\n')
    assert DataFile("what/plain.jsonl", "who/what").lines(Source()) == [("what/plain.jsonl, line 1", b'{"b": 2}')]
    with pytest.raises(
        DataError, match=r"cannot read gone\.jsonl of the data set who/what: .*with what/gone\.jsonl is"
    ):
        DataFile("what/gone.jsonl", "who/what").read(Source())
    missing = DataFile("what/y.jsonl", "who/what", "data.zip")
    with pytest.raises(
        DataError,
        match=r"cannot read y\.jsonl in data\.zip of the data set who/what: 0 files have this name.*--data",
    ):
        missing.read(Source())
    with pytest.raises(DataError, match=r"cannot read .*what/x\.jsonl: No such file"):
        file.read(Source(folder=tmp_path))
    with pytest.raises(DataError, match=r"z\.json is not on the hub: expected a folder"):
        DataFile("z.json").read(Source())
