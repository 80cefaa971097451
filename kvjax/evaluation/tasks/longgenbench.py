"""LongGenBench (arXiv 2409.02076): plans of diaries, menus, skyscrapers and cities, unit by unit, with given events.

Data, prompts and metrics are those of mozhu621/LongGenBench. The completion rate counts the units that were written. A
judge, Llama-3.1-8B-Instruct in the benchmark, decides whether a unit contains its event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvjax.evaluation.judge import Judge

from .files import DataFile, Record, examples
from .task import DataError, Example, Fault, Question, Scores, Source, Task

STARTED = "*** started ***\n"
FINISHED = "*** finished"
KINDS = ("once", "range", "periodic")


def units(text: str, kind: str) -> dict[int, str]:
    """The parts between #*#, by the number that follows `kind`. The first part with a number counts.

    A number of ten digits and more is that of no unit. Python refuses to read thousands of digits, which models repeat.
    """
    found: dict[int, str] = {}
    for part in text.split("#*#"):
        number = re.search(rf"{re.escape(kind)} (\d+)", part)
        if number and len(number.group(1)) < 10:
            found.setdefault(int(number.group(1)), part)
    return found


@dataclass(frozen=True)
class Checked:
    """The completion rate and, with a judge, the accuracy of each kind of event over the written units."""

    judge: Judge | None = None

    def __call__(self, prediction: str, question: Question) -> Scores:
        text = question.opening + prediction.split(FINISHED)[0]
        written = units(text, question.meta["type"])
        number = question.meta["number"]
        scores = {"completion_rate": sum(i in written for i in range(1, number + 1)) / number}
        if self.judge is None:
            return scores
        for kind in KINDS:
            events = question.meta[f"checks_{kind}"]
            asked = [(written[int(i)], event) for i, event in events.items() if int(i) in written]
            if asked:
                scores[f"accuracy_{kind}"] = sum(self._has(unit, event) for unit, event in asked) / len(asked)
                scores[f"checks_{kind}"] = len(asked)
        return scores

    def _has(self, unit: str, event: str) -> bool:
        assert self.judge is not None
        asked = (
            f"Context: {unit}### Instruction: Does this context include the {event}? "
            "Please answer with 'yes' or 'no' only."
        )
        return "yes" in self.judge(asked).lower()


@dataclass(frozen=True, kw_only=True)
class LongGenBenchTask(Task):
    """LongGenBench at one of its two lengths. The four scenarios take turns, so a limit selects each equally often."""

    file: DataFile

    def judged_by(self, judge: Judge) -> LongGenBenchTask:
        return replace(self, metric=Checked(judge))

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        found = list(examples(self.file.items(source), self._example))
        turns: dict[str, list[Example | Fault]] = {}
        for one in found:
            turns.setdefault(one.meta["type"] if isinstance(one, Example) else "", []).append(one)
        for turn in zip_longest(*turns.values()):
            yield from (one for one in turn if one is not None)

    def _example(self, record: Record) -> Example:
        prompt, prefix = record.text("prompt"), record.text("prefix")
        if not prompt.endswith(prefix):
            raise DataError(f"{record.where}: field 'prompt' does not end with {prefix!r}, which is field 'prefix'")
        before = prompt.removesuffix(prefix).removesuffix(STARTED).rstrip()
        meta: dict[str, Any] = {"type": record.text("type"), "number": record.integer("number")}
        if meta["number"] < 1:
            raise DataError(f"{record.where}: field 'number' is {meta['number']}; expected an integer >= 1")
        checks = {f"checks_{kind}": _checks(record, f"checks_{kind}") for kind in KINDS}
        question = Question(prompt.removeprefix(before), (), prefix, meta | checks)
        return Example(record.where.split(", ")[1].strip("[]"), before, (question,), meta)

    def overall(self, scores: Sequence[Scores]) -> dict[str, float]:
        """The accuracies over all checks of a kind, as in the benchmark, and their mean over the kinds."""
        means = {"completion_rate": super().overall(scores)["completion_rate"]} if scores else {}
        for kind in KINDS:
            judged = [one for one in scores if f"accuracy_{kind}" in one]
            if judged:
                right = sum(one[f"accuracy_{kind}"] * one[f"checks_{kind}"] for one in judged)
                means[f"accuracy_{kind}"] = right / sum(one[f"checks_{kind}"] for one in judged)
        accuracies = [means[f"accuracy_{kind}"] for kind in KINDS if f"accuracy_{kind}" in means]
        return means | ({"accuracy": sum(accuracies) / len(accuracies)} if accuracies else {})


def _checks(record: Record, name: str) -> Mapping[str, str]:
    """The events of the units, such as {"19": "an event"}. Raises DataError."""
    checks = record.object(name).fields
    for unit, event in checks.items():
        if not unit.isdecimal() or not isinstance(event, str):
            raise DataError(f"{record.where}: field {name!r} has {unit!r}: {event!r}; expected a number and a string")
    return checks


TASKS = tuple(
    LongGenBenchTask(
        name=f"longgenbench/{name}",
        new_tokens=tokens,
        metric=Checked(),
        varied=True,
        file=DataFile(f"longgenbench/{file}"),
    )
    for name, tokens, file in (("16k", 16_000, "Dataset_short.json"), ("32k", 32_000, "Dataset_long.json"))
)
