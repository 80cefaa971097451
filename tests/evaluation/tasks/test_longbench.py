"""LongBench and LongBench-E: every data set is read, asked and marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import DataError, Example, Fault, Source

NAMES = (
    "narrativeqa qasper multifieldqa_en multifieldqa_zh hotpotqa 2wikimqa musique dureader gov_report qmsum multi_news "
    "vcsum trec triviaqa samsum lsht passage_count passage_retrieval_en passage_retrieval_zh lcc repobench-p"
)
NOT_EXTENDED = {
    "narrativeqa",
    "multifieldqa_zh",
    "musique",
    "dureader",
    "qmsum",
    "vcsum",
    "lsht",
    "passage_retrieval_zh",
}
ANSWERS = {
    "trec": "Date",
    "lsht": "体育",
    "passage_count": "7",
    "passage_retrieval_en": "Paragraph 7",
    "passage_retrieval_zh": "段落7",
}
ALL = registry.find(["longbench/*", "longbench_e/*"])


def row(name: str, **changes: object) -> dict[str, object]:
    return {
        "_id": f"{name}-0",
        "input": "the input?",
        "context": "the context {with} braces",
        "answers": [ANSWERS[name]] if name in ANSWERS else ["an answer of five words", "another"],
        "length": 5000,
        "dataset": name,
        "language": "en",
        "all_classes": ["Date", "City", "体育"] if name in ("trec", "lsht") else None,
    } | changes


def write(folder: Path, file: str, *rows: object) -> Source:
    (folder / "longbench").mkdir(exist_ok=True)
    (folder / "longbench" / file).write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return Source(folder=folder)


def test_there_are_all_of_them() -> None:
    assert {task.name for task in ALL} == {f"longbench/{name}" for name in NAMES.split()} | {
        f"longbench_e/{name}" for name in NAMES.split() if name not in NOT_EXTENDED
    }
    assert len(ALL) == 21 + 13
    tokens = {task.name.split("/")[1]: task.new_tokens for task in ALL}
    assert sum(tokens.values()) == 128 * 4 + 64 * 6 + 32 * 7 + 512 * 4
    assert tokens["gov_report"] == 512
    assert tokens["samsum"] == tokens["dureader"] == 128
    assert {task.name.split("/")[1] for task in ALL if not task.chat} == {
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"
    }  # fmt: skip
    assert {task.truncation for task in ALL} == {"middle"}


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_each_is_asked_and_marked(task, tmp_path: Path) -> None:
    for library in ("rouge", "jieba", "rapidfuzz"):
        pytest.importorskip(library, reason="LongBench's metrics need the extra `eval`")
    family, name = task.name.split("/")
    source = write(tmp_path, f"{name}{'_e' if family == 'longbench_e' else ''}.jsonl", row(name))
    (example,) = task.examples(source)
    assert isinstance(example, Example)
    (question,) = example.questions
    assert example.id == f"{name}-0"
    assert example.meta == {"length": 5000, "language": "en"}
    assert example.context.endswith("the context {with} braces")
    assert ("the input?" in question.text) == (
        name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    )
    right = task.metric(question.answers[0], question)
    assert list(right.values()) == pytest.approx([1] * len(right))
    assert list(right)[1:] == (["4-8k"] if family == "longbench_e" else [])
    wrong = task.metric("nothing of it 99", question)
    assert max(wrong.values()) < 0.5
    assert set(task.metric("", question).values()) == {0}


def test_prompts_are_the_benchmarks_own(tmp_path: Path) -> None:
    def prompt(name: str) -> str:
        (task,) = registry.find(f"longbench/{name}")
        (example,) = task.examples(write(tmp_path, f"{name}.jsonl", row(name, context="CONTEXT", input="INPUT")))
        return example.context + example.questions[0].text

    assert prompt("2wikimqa") == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n"
        "\nThe following are given passages.\nCONTEXT\n\nAnswer the question based on the given passages. Only give me "
        "the answer and do not output any other words.\n\nQuestion: INPUT\nAnswer:"
    )
    assert prompt("multi_news") == (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\nCONTEXT\n\nNow, write a "
        "one-page summary of all the news.\n\nSummary:"
    )
    assert prompt("repobench-p") == "Please complete the code given below. \nCONTEXTINPUTNext line of code:\n"
    assert prompt("lsht") == "请判断给定新闻的类别，下面是一些例子。\n\nCONTEXT\nINPUT"  # noqa: RUF001
    assert prompt("passage_retrieval_zh").endswith('答案格式必须是"段落1"，"段落2"等格式\n\n答案是：')  # noqa: RUF001


def test_only_the_first_line_of_few_shot_answers_counts(tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="LongBench's ROUGE needs rouge (the extra `eval`)")
    (samsum,), (qmsum,) = registry.find("longbench/samsum"), registry.find("longbench/qmsum")
    (example,) = samsum.examples(write(tmp_path, "samsum.jsonl", row("samsum")))
    answer = "\n\nan answer of five words\nDialogue: and on"
    assert samsum.metric(answer, example.questions[0])["rouge_l"] == pytest.approx(1)
    assert qmsum.metric(answer, example.questions[0])["rouge_l"] < 1


def test_longbench_e_by_length(tmp_path: Path) -> None:
    (task,) = registry.find("longbench_e/passage_count")
    rows = [row("passage_count", _id=str(n), length=n) for n in (100, 3999, 4000, 7999, 8000)]
    found = list(task.examples(write(tmp_path, "passage_count_e.jsonl", *rows)))
    scores = [task.metric("7" if i % 2 else "7 8", one.questions[0]) for i, one in enumerate(found)]
    assert task.overall(scores) == {"count": 0.7, "0-4k": 0.75, "4-8k": 0.75, "8k+": 0.5}


def test_rows_that_cannot_be_asked(tmp_path: Path) -> None:
    def reason(name: str, **changes: object) -> str:
        (task,) = registry.find(f"longbench/{name}")
        (fault,) = task.examples(write(tmp_path, f"{name}.jsonl", row(name, **changes)))
        assert isinstance(fault, Fault)
        return fault.reason

    where = "longbench/{}.jsonl, line 1: field "
    assert reason("qasper", context="") == where.format("qasper") + "'context' is empty; expected a text"
    assert reason("qasper", length="5000") == where.format("qasper") + "'length' is a string; expected an integer"
    assert reason("trec", all_classes=None).startswith(where.format("trec") + "'all_classes' is null; expected a list")
    assert reason("passage_retrieval_en", answers=["7"]) == (
        where.format("passage_retrieval_en") + "'answers': reference '7': expected 'Paragraph' or '段落' and a number"
    )
    with pytest.raises(DataError, match=r"cannot read .*longbench/lcc\.jsonl: No such file"):
        next(registry.find("longbench/lcc")[0].examples(Source(folder=tmp_path)))
