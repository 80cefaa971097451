"""The needle tasks: the position of the needle and the length of the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import DataError, Source
from kvjax.evaluation.tasks.vocabulary import tokenizer

TOKENIZER = tokenizer()
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."


class Characters:
    """A lossless tokenizer with one token per character."""

    def __call__(self, text: str, **options: object) -> Characters:
        self.input_ids = [ord(character) for character in text]
        return self

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("depths", [11, 35])
def test_the_needle_lies_at_its_depth(data: Path, depths: int) -> None:
    (task,) = registry.find(f"needle/{depths}")
    essay = (data / "essays.txt").read_text()
    found = list(task.examples(Source(Characters(), 2000, count=depths + 2, folder=data)))
    assert [one.meta["depth"] for one in found] == pytest.approx(
        [i / (depths - 1) for i in range(depths)] + [0, 1 / (depths - 1)], abs=1e-4
    )
    assert len({one.id for one in found}) == depths + 2
    for i, one in enumerate(found):
        assert one.context.startswith("You are a helpful AI bot that answers questions for a user. Keep your response")
        hay = one.context.split("<context>\n")[1]
        assert len(hay) == 1800
        before, after = hay.split(f"\n{NEEDLE}\n")
        assert not before or i == depths - 1 or before.endswith(".")
        size = len(before + after)
        asked = one.meta["depth"] * size
        assert asked - 120 <= len(before) <= asked + 1  # the end of a sentence of at most fourteen words
        if i < depths:
            assert before + after == essay[:size]
        else:
            assert before + after == (essay * 3)[size : 2 * size]  # the next part of the essays
        (question,) = one.questions
        assert question.text.startswith("\n</context>\n\nWhat is the best thing to do in San Francisco? Don't give ")
        assert question.text.endswith(question.opening)
    assert list(task.examples(Source(Characters(), 2000, count=2, folder=data))) == found[:2]


def test_essays_begin_again_where_they_end(data: Path) -> None:
    (task,) = registry.find("needle/11")
    essay = (data / "essays.txt").read_text()
    (one,) = task.examples(Source(Characters(), 3 * len(essay), count=1, folder=data))
    assert essay + essay in one.context


@pytest.mark.long
def test_answers_are_marked_by_the_words_expected(data: Path) -> None:
    pytest.importorskip("rouge_score", reason="ROUGE-1 needs rouge-score (the extra `eval`)")
    (task,) = registry.find("needle/11")
    (one,) = task.examples(Source(Characters(), 1000, count=1, folder=data))
    (question,) = one.questions
    assert task.metric(NEEDLE, question) == pytest.approx({"recall": 1, "rouge1": 1})
    said = task.metric("Eat a sandwich in Dolores Park!", question)
    assert said["recall"] == pytest.approx(5 / 10)  # of: eat sandwich and sit in dolores park on sunny day
    assert task.metric("", question) == {"recall": 0, "rouge1": 0}


def test_what_is_missing(data: Path, tmp_path: Path) -> None:
    (task,) = registry.find("needle/11")
    with pytest.raises(ValueError, match=r"length=210 of needle/11: expected at least \d+ tokens"):
        next(task.examples(Source(TOKENIZER, 210, folder=data)))
    with pytest.raises(DataError, match=r"with one of essays\.txt"):
        next(task.examples(Source(TOKENIZER, 1000, folder=tmp_path)))
