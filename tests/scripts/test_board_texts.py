"""The texts on which the leaderboard's gates train: prompts without answers, and the second half of the essays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation.tasks.registry import find
from kvjax.evaluation.tasks.task import Example, Source
from kvjax.evaluation.tasks.vocabulary import tokenizer
from scripts import board_texts

WORDS = [f"word{i}." for i in range(3000)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(WORDS)}))
    return tmp_path


def test_the_essays_are_those_behind_the_middle(data: Path) -> None:
    found = board_texts.essays(data)
    assert len(found) == board_texts.PIECES
    words = "".join(found.values()).split()
    first = WORDS.index(words[1])  # words at both ends may be cut
    assert words[1:-1] == WORDS[first : first + len(words) - 2]
    assert 1500 < first < 1600
    assert len(WORDS) - first - len(words) < 10


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tokenizer with a chat template. Three prompts of a task are made, behind two."""
    monkeypatch.setattr(board_texts, "COUNT", 3)
    monkeypatch.setattr(board_texts, "BOARD", 2)
    words = tokenizer()
    words.chat_template = "<{{ messages[0].content }}>{{ '!' if add_generation_prompt }}"
    return words


def test_a_prompt_ends_where_its_answer_begins(data: Path, few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_texts, "TASKS", ("niah_single_2",))
    found = list(board_texts.prompts(few, data))
    (task,) = find("ruler/niah_single_2")
    for seed, same in ((board_texts.SEED, True), (0, False)):
        source = Source(few, board_texts.LENGTH + task.new_tokens, seed, 5, data)
        expected = []
        for example in list(task.examples(source))[2:]:
            assert isinstance(example, Example)
            (question,) = example.questions
            before, opening = question.text.removesuffix(question.opening), question.opening
            expected.append(f"<{example.context}{before}>!{opening}")
        assert len(found) == 3
        assert (found == expected) is same


def test_no_question_is_asked_by_a_board(data: Path, few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions of `qa_1` are the same for every seed."""
    asked = [{"question": f"Who is number{i}?", "answers": [{"text": f"word{i}"}]} for i in range(9)]
    paragraphs = [{"context": f"word{i} is number{i}.", "qas": [one]} for i, one in enumerate(asked)]
    (data / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    monkeypatch.setattr(board_texts, "TASKS", ("qa_1",))
    found = list(board_texts.prompts(few, data))
    assert [prompt[prompt.index("Question: ") :] for prompt in found] == [
        f"Question: Who is number{i}? >!Answer:" for i in (2, 3, 4)
    ]
