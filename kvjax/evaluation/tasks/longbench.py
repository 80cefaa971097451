"""LongBench and LongBench-E (arXiv 2308.14508), as in THUDM/LongBench (MIT); the prompts are in longbench.yaml.

The official script also ends SAMSum's answers at a line end. Only the first line is marked, so scores are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from kvjax.checks import shown
from kvjax.evaluation import metrics

from .files import DataFile, Record, examples
from .task import DataError, Example, Fault, Question, Scores, Source, Task


def retrieval(prediction: str, reference: str) -> float:
    """The share of the numbers in the prediction that equal the paragraph of the reference."""
    return metrics.numbers_right(prediction, paragraph(reference))


def paragraph(reference: str) -> str:
    """The number in "Paragraph 3" or "段落3". Raises DataError if there is none."""
    if found := re.search(r"(?:Paragraph |段落)(\d+)", reference):
        return found.group(1)
    raise DataError(f"reference {shown(reference)}: expected 'Paragraph' or '段落' and a number")


METRICS: dict[str, Callable[..., float]] = {
    "qa_f1": metrics.qa_f1,
    "qa_f1_zh": metrics.qa_f1_zh,
    "rouge_l": metrics.rouge_l,
    "rouge_l_zh": metrics.rouge_l_zh,
    "code_similarity": metrics.code_similarity,
    "count": metrics.numbers_right,
    "retrieval": retrieval,
    "classification": metrics.classification,
}


@dataclass(frozen=True)
class Marked:
    """A metric of LongBench: the best score over the references.

    Attributes:
        name: the name of the metric in METRICS.
        first_line: whether only the first line of an answer counts.
        by_length: whether the score is repeated under the length class of the context, as LongBench-E reports it.
    """

    name: str
    first_line: bool = False
    by_length: bool = False

    def __call__(self, prediction: str, question: Question) -> Scores:
        if self.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        more = [question.meta["classes"]] if self.name == "classification" else []
        score = max(METRICS[self.name](prediction, reference, *more) for reference in question.answers)
        return {self.name: score, **({length_class(question.meta["length"]): score} if self.by_length else {})}


def length_class(words: int) -> str:
    """LongBench-E's class of a context of `words` words."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


@dataclass(frozen=True, kw_only=True)
class LongBenchTask(Task):
    """One data set of LongBench.

    Attributes:
        metric: one of LongBench's metrics.
        before: the text of the prompt before the context.
        after: the text of the prompt after the context, with the placeholder {input}.
        file: the file of the examples.
    """

    metric: Marked
    before: str
    after: str
    file: DataFile

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        return examples(self.file.lines(source), self._example)

    def _example(self, record: Record) -> Example:
        length, answers = record.integer("length"), record.texts("answers")
        needed: dict[str, Any] = {"length": length}
        if self.metric.name == "classification":
            needed["classes"] = list(record.texts("all_classes"))
        elif self.metric.name == "retrieval":
            try:
                _ = [paragraph(answer) for answer in answers]
            except DataError as error:
                raise DataError(f"{record.where}: field 'answers': {error}") from None
        question = Question(self.after.replace("{input}", record.text("input", empty=True)), answers, meta=needed)
        meta = {"length": length, "language": record.text("language")}
        return Example(record.text("_id"), self.before + record.text("context"), (question,), meta)


def _task(name: str, of: dict[str, Any], *, extended: bool) -> LongBenchTask:
    before, after = of["prompt"].split("{context}")
    file = f"{name}_e.jsonl" if extended else f"{name}.jsonl"
    return LongBenchTask(
        name=f"longbench_e/{name}" if extended else f"longbench/{name}",
        new_tokens=of["new_tokens"],
        metric=Marked(of["metric"], of.get("first_line", False), extended),
        truncation="middle",
        chat=of.get("chat", True),
        before=before,
        after=after,
        file=DataFile(f"longbench/{file}", "THUDM/LongBench", "data.zip"),
    )


_ALL = yaml.safe_load((files(__package__) / "longbench.yaml").read_text("utf-8"))
TASKS = (
    *(_task(name, of, extended=False) for name, of in _ALL.items()),
    *(_task(name, of, extended=True) for name, of in _ALL.items() if of.get("e")),
)
