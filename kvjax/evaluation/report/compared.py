"""Policies beside a reference: scores with paired differences, memory and speed, and what follows in a sentence."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from kvjax.evaluation.items import Item
from kvjax.evaluation.lines import decoding_speed
from kvjax.evaluation.report.results import CellResults, Results, asked_by
from kvjax.evaluation.report.statistics import FEWEST, Difference, Interval, difference, interval
from kvjax.evaluation.report.tables import p_text, percent

LEAST_TOKENS = 512  # the speed of fewer decoded tokens says nothing
LEVEL = 0.05  # the largest p-value of a difference


@dataclass(frozen=True)
class Compared:
    """A policy in a setting, beside a reference.

    Attributes:
        policy: the name of the policy.
        question: the setting.
        score: the mean of the tasks' scores, with its 95 % interval.
        difference: the score minus that of the reference on the same examples; None for the reference itself.
        cache_bytes: the bytes that a row's cache reserves at the end of an answer, on average.
        memory: these bytes as a share of the reference's for the same answers; None for the reference itself.
        tokens_per_second: decoded tokens of all rows of a batch per second; None if fewer than `LEAST_TOKENS` were.
    """

    policy: str
    question: str
    score: Interval
    difference: Difference | None
    cache_bytes: float
    memory: float | None
    tokens_per_second: float | None

    def sentence(self, reference: str) -> str:
        """Says what follows from the difference; empty for the reference itself."""
        if self.difference is None:
            return ""
        mean, low, high, p = self.difference
        place = "" if self.memory is None else f" at {self.memory:.2f} of the memory of {reference}"
        if math.isnan(p):
            few = f"; a task has fewer than {FEWEST} texts, too few for an interval"
            return f"{self.policy}: {100 * mean:+.1f} points{place}{few}"
        if low <= 0 <= high or p > LEVEL:
            spread = f"{100 * low:+.1f} to {100 * high:+.1f} points, p {p_text(p)}"
            return f"{self.policy}: no difference shown ({spread}){place}"
        verb, (least, most) = ("loses", (-high, -low)) if mean < 0 else ("gains", (low, high))
        return f"{self.policy} {verb} {percent(abs(mean))} points ({percent(least)} to {percent(most)}){place}"


def compared(results: Results, question: str, reference: str) -> list[Compared]:
    """Each policy of a setting beside the policy `reference`, which is the first.

    Raises:
        ValueError: the reference lacks answers to a task.
    """
    cells = {name.policy: cell for name, cell in results.cells.items() if name.question == question}
    first = cells.get(reference)
    if first is None or first.mean(results.columns) is None:
        raise ValueError(f"{reference} has no score in every task: expected a policy that answers all of them")
    others = [cell for cell in cells.values() if cell is not first]
    return [made for cell in [first, *others] if (made := _compared(results, cell, first)) is not None]


def _compared(results: Results, cell: CellResults, first: CellResults) -> Compared | None:
    score = interval(cell, results.columns)
    if score is None:
        return None
    tokens = sum(took["decoded_tokens"] for took in cell.timings)
    return Compared(
        cell.name.policy,
        cell.name.question,
        score,
        None if cell is first else difference(cell, first, results.columns),
        fmean(line["kv_bytes_end"] for line in cell.lines),
        None if cell is first else cell.reserved_of(first),
        decoding_speed(cell.timings) if tokens >= LEAST_TOKENS else None,
    )


def answers_to(results: Results, items: Iterable[Item], policies: Collection[str]) -> Results:
    """The answers of some policies to some items: a folder may hold those of other runs too."""
    asked = {(i.task.name, i.length, i.example.id, n) for i in items for n in range(len(i.questions))}
    cells = {
        name: replace(cell, lines=lines)
        for name, cell in results.cells.items()
        if name.policy in policies and (lines := tuple(line for line in cell.lines if asked_by(line) in asked))
    }
    return replace(results, cells=cells)
