"""LongBench-Write (LongWriter, arXiv 2408.07055): texts of a required length, as in THUDM/LongWriter (Apache-2.0).

The length score is computed. A judge, GPT-4o in the benchmark, marks the quality with the benchmark's own prompt. The
repetition rate of ten consecutive words, which MorphKV reports, is an additional score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from kvjax.evaluation import metrics
from kvjax.evaluation.judge import Judge, JudgeError

from .files import DataFile, Record, examples
from .task import DataError, Example, Fault, Question, Scores, Source, Task

DIMENSIONS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
TRIES = 5


@dataclass(frozen=True)
class Written:
    """S_l and, with a judge, S_q: the mean of six marks, which are scaled from 1 to 5 to the range 0 to 1."""

    judge: Judge | None = None

    def __call__(self, prediction: str, question: Question) -> Scores:
        scores = {"length": metrics.length_score(metrics.count_words(prediction), question.meta["length"])}
        if self.judge is not None:
            marks = judged(self.judge, question.meta["prompt"], prediction)
            scores["quality"] = sum(marks.values()) / len(marks)
            scores |= marks
        repeated = metrics.repetition(prediction, 10)
        return scores if repeated is None else scores | {"repetition": repeated}


def judged(judge: Judge, prompt: str, response: str) -> dict[str, float]:
    """The judge's mark of each dimension in [0, 1]. Raises JudgeError if five replies have no valid marks."""
    asked = _template().replace("$INST$", prompt).replace("$RESPONSE$", response)
    reply = ""
    for _ in range(TRIES):
        reply = judge(asked)
        fenced = re.search(r"```json\n(.*?)\n```", reply, re.DOTALL)
        try:
            marks = json.loads((fenced.group(1) if fenced else reply).replace("\n", ""))
            found = {name: (float(marks[name]) - 1) / 4 for name in DIMENSIONS}
        except (ValueError, KeyError, TypeError):
            continue
        if all(0 <= mark <= 1 for mark in found.values()):
            return found
    raise JudgeError(f"{TRIES} replies of the judge, the last one {reply[:200]!r}: expected marks from 1 to 5")


@cache
def _template() -> str:
    return (files(__package__) / "longwriter_judge.txt").read_text("utf-8")


@dataclass(frozen=True, kw_only=True)
class LongWriterTask(Task):
    """Requests to write a text. The last word of each is its question, because every example needs a question."""

    file: DataFile

    def judged_by(self, judge: Judge) -> LongWriterTask:
        return replace(self, metric=Written(judge))

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        return examples(self.file.lines(source), self._example)

    def _example(self, record: Record) -> Example:
        prompt, required = record.text("prompt"), record.integer("length")
        if required < 1 or len(prompt) < 2:
            raise DataError(
                f"{record.where}: fields 'prompt' and 'length' are {prompt[:40]!r} and {required}; "
                "expected a text and a length >= 1"
            )
        end = max(prompt.rstrip().rfind(" "), prompt.rstrip().rfind("\n"))
        end = end if end > 0 else len(prompt) - 1  # Chinese text has no spaces
        meta = {"length": required, "type": record.text("type")}
        question = Question(prompt[end:], (), meta={"length": required, "prompt": prompt})
        return Example(record.where.rsplit(" ", 1)[1], prompt[:end], (question,), meta)


TASKS = tuple(
    LongWriterTask(
        name=f"longwriter/{name}",
        new_tokens=32_768,
        metric=Written(),
        varied=True,
        file=DataFile(f"longwriter/{file}"),
    )
    for name, file in (
        ("write", "longbench_write.jsonl"),
        ("write_en", "longbench_write_en.jsonl"),
        ("ruler", "longwrite_ruler.jsonl"),
    )
)
