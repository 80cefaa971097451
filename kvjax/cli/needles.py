"""The demo on a model of the user's: RULER's needles in essays, answered by `kvjax eval`'s runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.evaluate import run_here
from kvjax.cli.outcomes import Outcome, Shown

if TYPE_CHECKING:
    from kvjax.evaluation.items import Item
    from kvjax.evaluation.lines import Line

TASKS = ("ruler/niah_single_2", "ruler/niah_multikey_1")  # one needle among essays, and one of four


def answer_needles(
    model: str,
    data: Path,
    policies: Sequence[str],
    length: int,
    examples: int,
    budgets: list[int],
    seed: int,
    out: Path,
) -> tuple[list[Outcome], list[Shown], list[str]]:
    """Answers needles in essays under each policy at each budget; returns outcomes, examples and their tasks.

    An interrupted run continues in `out`. The policies see the question when they compress.

    Raises:
        ValueError: the model or the essays cannot be read, an example cannot be asked, or a policy fails.
    """
    from kvjax.evaluation.grid import Grid
    from kvjax.evaluation.lines import read_answer, read_lines, read_timing
    from kvjax.evaluation.model import plan_run
    from kvjax.evaluation.planning import sentence
    from kvjax.evaluation.records import RESULTS, TIMINGS

    counts = [examples - examples // 2, examples // 2]
    given: dict[str, Any] = {
        "title": "Needles in essays",
        "model": model,
        "data": str(data),
        "tasks": [
            {"name": task, "lengths": [length], "limit": count}
            for task, count in zip(TASKS, counts, strict=True)
            if count
        ],
        "policies": ["full", *(f"{name}:budget={{budget}}" for name in policies)],
        "budgets": budgets,
        "question": "before",
        "batch": examples,
        "seed": seed,
    }
    plan = plan_run(Grid.of(given))
    if errors := plan.errors():
        raise ValueError(sentence(errors[0]))
    summary = run_here(plan, out)
    if summary.errors:
        raise ValueError(summary.errors[0])
    lines, timings = read_lines(out / RESULTS, read_answer), read_lines(out / TIMINGS, read_timing)
    cells = [("full", None), *((name, budget) for name in policies for budget in budgets)]
    full = _lines_of(lines, cells[0], plan.items)
    outcomes = [_outcome(cell, _lines_of(lines, cell, plan.items), timings, full) for cell in cells]
    return outcomes, [_shown(item) for item in plan.items], [item.task.name for item in plan.items]


def _lines_of(lines: list[Line], cell: tuple[str, int | None], items: Sequence[Item]) -> list[Line]:
    """The lines of a policy at a budget, one per item."""
    found = {(line["task"], line["length"], line["id"]): line for line in lines if _cell(line) == cell}
    return [found[item.task.name, item.length, item.example.id] for item in items]


def _outcome(cell: tuple[str, int | None], lines: list[Line], timings: list[Line], full: list[Line]) -> Outcome:
    from kvjax.evaluation.lines import decoding_speed

    policy, budget = cell
    correct = [next(iter(line["scores"].values())) == 1 for line in lines]
    took = [timing for timing in timings if _cell(timing) == cell and "decode_seconds" in timing]
    size, whole = (sum(line["kv_bytes_end"] for line in answered) for answered in (lines, full))
    return Outcome(
        policy,
        budget,
        correct=correct,
        answers=[line["prediction"].strip() for line in lines],
        accuracy=sum(correct) / len(correct),
        kv_bytes=size,
        compression=whole / size,
        tokens_per_second=decoding_speed(took),
    )


def _cell(line: Line) -> tuple[str, int | None]:
    return line["policy"], line["budget"]


def _shown(item: Item) -> Shown:
    """The example of an item: the sentences with the answer, and the question without what opens the answer."""
    from kvjax.evaluation.tasks.haystack import sentences

    (question,) = item.example.questions
    telling = [text for text in sentences(item.example.context) if any(answer in text for answer in question.answers)]
    asked = question.text.removesuffix(question.opening).strip()
    return Shown(" ... ".join(telling), asked, ", ".join(question.answers))
