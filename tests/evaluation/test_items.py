"""Examples are tokenized, cut or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.tasks.task import Example, Fault, Question
from kvjax.evaluation.tasks.vocabulary import encode, tokenizer
from tests.evaluation.words import example, items

GRID = Grid.of({"tasks": ["test/*"], "policies": ["full"]})
NAMES = "adam alan alice amir anna arno beth boris bruno carl cecil celia chloe clara cora dana"
TEMPLATE = "{% for m in messages %}the {{ m.content }} .{% endfor %}{% if add_generation_prompt %} one :{% endif %}"


def one(found: list[Item | Refusal]) -> Item:
    (item,) = found
    assert isinstance(item, Item)
    return item


def test_context_and_questions_are_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    item = one(items(monkeypatch, GRID, tokenizer(), [example("a", NAMES, " what is adam :", " what is alan :")]))
    np.testing.assert_array_equal(item.context, encode(NAMES))
    assert [ids.tolist() for ids in item.questions] == [encode(f"what is {n} :").tolist() for n in ("adam", "alan")]
    assert (item.new_tokens, item.cut) == (4, 0)


def test_special_tokens_begin_the_context_alone(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    item = one(items(monkeypatch, GRID, tokenizer, [example("a", "ba be bi", " bo bu")]))
    assert item.context.tolist() == tokenizer("ba be bi")["input_ids"]
    assert item.questions[0].tolist() == tokenizer("bo bu", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("max_length", "max_positions"), [(12, 64), (None, 16)])
def test_middle_is_cut(monkeypatch: pytest.MonkeyPatch, max_length: int | None, max_positions: int) -> None:
    """With a limit of 12 tokens, the first 6 and the last 6 remain; the last 6 include the complete question."""
    grid = GRID.but(max_length=max_length)
    given = [example("a", NAMES, " what is adam :")]
    item = one(items(monkeypatch, grid, tokenizer(), given, truncation="middle", max_positions=max_positions))
    assert item.context.tolist() == encode(" ".join(NAMES.split()[:6] + NAMES.split()[-2:])).tolist()
    assert item.questions[0].size == 4
    assert item.cut == 8


@pytest.mark.parametrize(("omitted", "kept"), [("", 8), ("the rest is omitted", 4)])
def test_the_end_of_the_context_is_cut(monkeypatch: pytest.MonkeyPatch, omitted: str, kept: int) -> None:
    """With a limit of 12 tokens, the beginning of the context, the notice of the omission and the question remain."""
    given = [replace(example("a", NAMES, " what is adam :"), omitted=omitted)]
    item = one(items(monkeypatch, GRID.but(max_length=12), tokenizer(), given, truncation="end"))
    words = tokenizer()
    expected = encode(" ".join(NAMES.split()[:kept])).tolist() + words(omitted).input_ids
    assert item.context.tolist() == expected
    assert item.questions[0].size == 4
    assert item.cut == 16 - kept
    (refusal,) = items(monkeypatch, GRID.but(max_length=4), tokenizer(), given, truncation="end")
    assert isinstance(refusal, Refusal)


def test_the_chat_template_goes_around_both(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE
    asked = Question(" what is adam : adam is", ("key",), opening=" adam is")
    item = one(items(monkeypatch, GRID.but(chat=True), words, [Example("a", NAMES, (asked,))]))
    assert item.context.tolist() == encode(f"the {NAMES}").tolist()
    assert item.questions[0].tolist() == encode("what is adam : . one : adam is").tolist()
    plain = one(items(monkeypatch, GRID.but(chat=True), words, [Example("a", NAMES, (asked,))], chat=False))
    assert plain.context.tolist() == encode(NAMES).tolist()


def test_what_cannot_be_asked_is_reported_and_the_rest_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ["no/such", "test/*", {"name": "demo/keys", "lengths": [1024]}, "demo/needle"]
    grid = Grid.of({"tasks": tasks, "policies": ["full"], "limit": 8})
    given = [
        example("empty", " ", " what is adam :"),
        Fault("broken", "data.jsonl, line 2: no field 'answers'"),
        example("good", NAMES, " what is adam :"),
        example("good", NAMES, " what is alan :"),
        example("mute", NAMES, " "),
        example("long", f"{NAMES} {NAMES} {NAMES} {NAMES}", " what is adam :"),
    ]
    found = items(monkeypatch, grid, tokenizer(), given)
    assert [item.example.id for item in found if isinstance(item, Item)] == ["good"]
    refused = {(r.task, r.id): r.reason for r in found if isinstance(r, Refusal)}
    assert "no task matches 'no/such'" in refused["no/such", None]
    assert refused["test/words", "broken"] == "data.jsonl, line 2: no field 'answers'"
    assert "same id" in refused["test/words", "good"]
    for name in ("empty", "mute"):
        assert "an empty context or question" in refused["test/words", name]
    assert refused["test/words", "long"] == (
        "a prompt of 68 tokens and an answer of 4: expected a prompt of 60 tokens or fewer"
    )
    assert "a prompt of 48 tokens or fewer" in refused["demo/keys", "1024-0"]
    assert "expected a length in tokens" in refused["demo/needle", None]
    longer = items(
        monkeypatch, Grid.of({"tasks": "test/words", "policies": "full", "new_tokens": 9999}), tokenizer(), given[2:3]
    )
    assert [r.reason.partition("expected ")[2] for r in longer if isinstance(r, Refusal)] == [
        "an answer of fewer than 64 tokens"
    ]
    bare = tokenizer()
    bare.chat_template = None
    with_chat = items(monkeypatch, GRID.but(chat=True), bare, given[2:3])
    assert [r.reason for r in with_chat if isinstance(r, Refusal)] == [
        "chat: true, but the model's tokenizer has no chat template; expected chat: false"
    ]
    words = tokenizer()
    words.chat_template = "{{ raise_exception('no system message') }}"
    assert [r.reason for r in items(monkeypatch, GRID.but(chat=True), words, given[2:3]) if isinstance(r, Refusal)] == [
        "the tokenizer's chat template failed with TemplateError: no system message"
    ]


def test_what_the_results_file_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "what is adam :"
    given = [
        example("good", NAMES, asked, answer="é", level=1),
        example("surrogate", NAMES, asked, answer="\ud83d"),
        example("object", NAMES, asked, n=np.int64(1)),
        example("nan", NAMES, asked, level=float("nan")),
    ]
    found = items(monkeypatch, GRID, tokenizer(), given)
    with pytest.raises(ValueError, match="not JSON compliant") as why:
        json.dumps(float("nan"), allow_nan=False)
    assert [(one.id, one.reason) for one in found if isinstance(one, Refusal)] == [
        ("surrogate", "answers=('\\ud83d',): expected texts without lone surrogates"),
        ("object", "meta={'n': np.int64(1)}: expected values of JSON (Object of type int64 is not JSON serializable)"),
        ("nan", f"meta={{'level': nan}}: expected values of JSON ({why.value})"),
    ]


def test_a_task_without_examples_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the task has no example, as of an empty file: expected at least one"
    assert items(monkeypatch, GRID, tokenizer(), []) == [Refusal("test/words", None, None, reason)]


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_example_has_its_tokens_as_texts(monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    given = [example(name, NAMES, " what is adam :", " what is alan :") for name in "ab"]
    first, second = items(monkeypatch, GRID, tokenizer(), given, shown=shown)
    assert isinstance(first, Item)
    assert isinstance(second, Item)
    assert second.pieces == ()
    if not shown:
        assert first.pieces == ()
        return
    assert ["".join(texts) for texts in first.pieces] == [NAMES, "what is adam :", "what is alan :"]
    assert [len(texts) for texts in first.pieces] == [first.context.size, 4, 4]


def test_lengths_that_no_task_reads_are_refused() -> None:
    files = {"name": "longbench/qasper", "lengths": [4096]}
    grid = Grid.of({"tasks": files, "policies": "full", "data": "nowhere"})
    with pytest.raises(ValueError, match=r"lengths=\[4096\], but all tasks are read from files: expected a generated"):
        list(read_items(grid, tokenizer(), 4096))
    both = Grid.of({"tasks": [files, {"name": "demo/keys", "lengths": [64]}], "policies": "full", "data": "nowhere"})
    assert {one.length for one in read_items(both.limited(1), tokenizer(), 4096) if isinstance(one, Item)} == {64}


def test_an_entry_that_occurs_twice_has_one_limit() -> None:
    one = {"name": "demo/needle", "lengths": [64], "limit": 1}
    for again, message in ((one, None), ({**one, "limit": 2}, "demo/needle at 64 tokens occurs with limit=1 and lim")):
        grid = Grid.of({"tasks": [one, again], "policies": ["full"]})
        if message is None:
            assert len(list(read_items(grid, tokenizer(), 4096))) == 1
        else:
            with pytest.raises(ValueError, match=message):
                list(read_items(grid, tokenizer(), 4096))
