"""Metrics on cases small enough to follow the official definitions by hand, and on the sources' own examples."""

from __future__ import annotations

import sys

import pytest

from kvjax.evaluation import metrics


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("The cat, sat!", "a CAT sat", 1),  # case, punctuation and articles do not count
        ("cat cat dog", "cat bird", 2 / 5),  # one word in common: 1/3 and 1/2
        ("the", "the", 0),  # nothing is left
        ("", "yes", 0),
    ],
)
def test_qa_f1(prediction: str, reference: str, score: float) -> None:
    assert metrics.qa_f1(prediction, reference) == pytest.approx(score)


def test_chinese_words() -> None:
    pytest.importorskip("jieba", reason="Chinese words need jieba (the extra `eval`)")
    assert metrics.cut("我来到北京清华大学") == ["我", "来到", "北京", "清华大学"]  # jieba's own example
    assert metrics.qa_f1_zh("我来到，北京。", "我来到北京清华大学") == pytest.approx(2 * 3 / (3 + 4))  # noqa: RUF001
    assert metrics.qa_f1_zh("", "北京") == 0


@pytest.mark.long
def test_rouge_l() -> None:
    pytest.importorskip("rouge", reason="LongBench's ROUGE needs rouge (the extra `eval`)")
    # Longest common subsequence of 4 and 5 words: 3, so 2 * (3/4) * (3/5) / (3/4 + 3/5) = 2/3.
    assert metrics.rouge_l("police killed the gunman", "police shot and killed gunman") == pytest.approx(2 / 3)
    assert metrics.rouge_l("", "a b") == metrics.rouge_l(" . ", "a b") == metrics.rouge_l("a", ".") == 0
    long = " ".join(f"w{i}" for i in range(sys.getrecursionlimit() + 100))
    assert metrics.rouge_l(long, long) == pytest.approx(1)  # deeper than Python's usual limit


def test_rouge_l_of_chinese_words() -> None:
    pytest.importorskip("rouge", reason="LongBench's ROUGE needs rouge (the extra `eval`)")
    pytest.importorskip("jieba", reason="Chinese words need jieba (the extra `eval`)")
    assert metrics.rouge_l_zh("我来到北京", "我来到北京清华大学") == pytest.approx(2 * 3 / (3 + 4))


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("It is a Date.", "Date", 1),
        ("Date or City", "Date", 1 / 2),
        ("City", "Date", 0),
        ("Other location", "Other location", 1),  # "location" is part of the right one, and is taken out
        ("location", "Other location", 0),
    ],
)
def test_classification(prediction: str, reference: str, score: float) -> None:
    assert metrics.classification(prediction, reference, ["Date", "City", "location", "Other location"]) == score


def test_classification_passes_over_names_as_the_original_does() -> None:
    # Taking out the first name moves the second one to its place, which is not looked at again.
    assert metrics.classification("abc", "abc", ["a", "b", "abc"]) == 1 / 2


def test_numbers() -> None:
    assert metrics.numbers_right("Paragraph 12, or 3, or 12", "12") == pytest.approx(2 / 3)
    assert metrics.numbers_right("112", "12") == 0
    assert metrics.numbers_right("none", "12") == 0


def test_code_similarity() -> None:
    pytest.importorskip("rapidfuzz", reason="code similarity needs rapidfuzz (the extra `eval`)")
    assert metrics.code_similarity("\n# a comment\n```python\nreturn x\nreturn y", "return x") == 1
    # fuzzywuzzy's own example: "this is a test" and "this is a test!" are 97 percent alike
    assert metrics.code_similarity("this is a test", "this is a test!") == 0.97
    assert metrics.code_similarity("# only\n// comments", "return x") == 0


def test_rouge_of_scrolls() -> None:
    pytest.importorskip("rouge_score", reason="SCROLLS' ROUGE needs rouge-score (the extra `eval`)")
    predictions = ["exact match example", "hello there", "general kenobi"]  # the example of the metric's documentation
    references = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
    found = [metrics.rouge(p, r) for p, r in zip(predictions, references, strict=True)]
    means = {name: sum(one[name] for one in found) / 3 for name in found[0]}
    assert means == pytest.approx({"rouge1": 0.722222, "rouge2": 0.333333, "rougeL": 0.722222}, abs=1e-6)
    f1 = [max(metrics.unaccented_f1(p, one) for one in r) for p, r in zip(predictions, references, strict=True)]
    assert sum(f1) / 3 == pytest.approx(0.722222, abs=1e-6)


def test_accents_do_not_count() -> None:
    assert metrics.unaccented_f1("café", "cafe") == 1
    assert metrics.qa_f1("café", "cafe") == 0


def test_letters() -> None:
    assert metrics.letter("The answer is (B), not C.") == "B"
    assert metrics.letter("ABC") is None


@pytest.mark.parametrize(
    ("prediction", "score"), [("60%", 1), ("about 50.0% are", 0.5), ("80% or 60%", 0.25), ("sixty", 0), ("60", 0)]
)
def test_percentages(prediction: str, score: float) -> None:
    assert metrics.percentage_similarity(prediction, "60%") == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("3, 1, 2, 4", 1),
        ("The order is 3, 1, 4, 2.", 5 / 6),  # of six pairs, one is the wrong way round
        ("4, 2, 1, 3", 0),
        ("3, 1, 2", 0),
        ("3, 1, 2, 2", 0),
        ("3, 1, 2, 4, " + "1" * 5_000, 0),
        ("03, 1, 2, 4", 1),
        ("", 0),
    ],
)
def test_concordance(prediction: str, score: float) -> None:
    assert metrics.concordance(prediction, "3, 1, 2, 4") == pytest.approx(score)


def test_length_score() -> None:
    assert metrics.count_words("Hello big world 你好, 123") == 5
    assert metrics.length_score(1000, 1000) == 1
    assert metrics.length_score(2000, 1000) == pytest.approx(2 / 3)
    assert metrics.length_score(500, 1000) == pytest.approx(1 / 2)
    assert metrics.length_score(4000, 1000) == metrics.length_score(333, 1000) == metrics.length_score(0, 1000) == 0


def test_repetition() -> None:
    assert metrics.repetition("a b c a b c", 3) == pytest.approx(1 / 4)  # abc bca cab abc
    assert metrics.repetition("a b c d", 2) == 0
    assert metrics.repetition("a " * 19, 10) == pytest.approx(9 / 10)
    assert metrics.repetition("too short", 10) is None
