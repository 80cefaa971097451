"""ZeroSCROLLS: prompts are split at the indices in the data, and each task has its metric."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import Example, Fault, Question, Source

ALL = registry.find("zero_scrolls/*")
OUTPUTS = {"quality": "C", "space_digest": "60%", "book_sum_sort": "2, 3, 1"}
START, QUERY, END = "You are given a story.\n\nStory:\nOnce upon a time.", "\n\nQuestion:\nWhen?", "\n\nAnswer:\n"


def row(output: str, **changes: object) -> dict[str, object]:
    return {
        "id": "a1",
        "pid": "a1_0",
        "input": START + QUERY + END,
        "output": output,
        "document_start_index": START.index("Once"),
        "document_end_index": len(START),
        "query_start_index": len(START) + 2,
        "query_end_index": len(START + QUERY),
        "truncation_seperator": "... [The rest of the story is omitted]\n\n",
    } | changes


def read(folder: Path, name: str, *rows: object) -> list[Example | Fault]:
    (folder / "zero_scrolls" / name).mkdir(parents=True, exist_ok=True)
    (folder / "zero_scrolls" / name / "validation.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    (task,) = registry.find(f"zero_scrolls/{name}")
    return list(task.examples(Source(folder=folder)))


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_each_is_asked_and_marked(task, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score", reason="SCROLLS' ROUGE needs rouge-score (the extra `eval`)")
    name = task.name.split("/")[1]
    output = OUTPUTS.get(name, "long before our days")
    other = "D" if name == "quality" else "10%" if name == "space_digest" else "3, 2, 1"
    (example,) = read(tmp_path, name, row(output), row(other))  # rows with the same id are references of one example
    (question,) = example.questions
    assert example.context + question.text == START + QUERY + END
    assert (example.context, question.opening) == (START, END)
    assert question.answers == (output, other)
    right = task.metric(output, question)
    assert list(right.values()) == pytest.approx([1] * len(right))
    assert set(task.metric(other, question).values()) == {1}
    assert set(task.metric("", question).values()) == {0}
    assert example.omitted == "... [The rest of the story is omitted]\n\n"
    assert (task.new_tokens, task.truncation) == (1024, "end")


def test_there_are_ten() -> None:
    assert {task.name.split("/")[1] for task in ALL} == {
        "gov_report", "summ_screen_fd", "qmsum", "squality", "qasper", "narrative_qa", "quality", "musique",
        "space_digest", "book_sum_sort",
    }  # fmt: skip


def test_rouge_is_the_geometric_mean_of_means() -> None:
    pytest.importorskip("rouge_score", reason="SCROLLS' ROUGE needs rouge-score (the extra `eval`)")
    (task,) = registry.find("zero_scrolls/qmsum")
    references = [("exact match example",), ("hello", "hi there"), ("commander kenobi",)]
    predictions = ["exact match example", "hello there", "general kenobi"]
    scores = [task.metric(p, Question("?", r)) for p, r in zip(predictions, references, strict=True)]
    # the values in the documentation of SCROLLS' metric
    assert task.overall(scores) == pytest.approx(
        {"rouge": 0.558136, "rouge1": 0.722222, "rouge2": 0.333333, "rougeL": 0.722222}, abs=1e-6
    )


def test_rows_that_cannot_be_asked(tmp_path: Path) -> None:
    good, *faults = read(
        tmp_path,
        "quality",
        row("none of them"),
        row("A", document_end_index=10_000),
        row("A", query_end_index=3),
        {key: value for key, value in row("A").items() if key != "output"},
        row("B", id="a2"),
    )
    assert isinstance(good, Example)
    reasons = [fault.reason.removeprefix("zero_scrolls/quality/validation.jsonl, line ") for fault in faults]
    assert reasons[0] == "1: field 'output' is 'none of them'; expected one of the letters A to D"
    assert reasons[1].startswith("2: fields 'document_end_index' and 'query_end_index' are 10000 and ")
    assert reasons[2].endswith(f"<= {len(START + QUERY + END)}, the length of 'input'")
    assert reasons[3] == "4: field 'output' is missing; expected a string"
