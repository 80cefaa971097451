"""Small tasks for tests, and their items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.tasks import registry
from kvjax.evaluation.tasks.task import Example, Fault, Question, Scores, Source, Task


def exact(prediction: str, question: Question) -> Scores:
    return {"exact_match": float(prediction == question.answers[0])}


@dataclass(frozen=True)
class Words(Task):
    """A task with the given examples."""

    given: tuple[Example | Fault, ...] = ()

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        yield from self.given


def example(name: str, context: str, *questions: str, answer: str = "key", **meta: Any) -> Example:
    return Example(name, context, tuple(Question(text, (answer,)) for text in questions), meta)


def items(
    monkeypatch: pytest.MonkeyPatch, grid: Grid, tokenizer: Any, given: Sequence[Example | Fault], **options: Any
) -> list[Item | Refusal]:
    """The items of a grid whose task `test/words` gives these examples."""
    positions = options.pop("max_positions", 64)
    task = Words(
        "test/words", options.pop("new_tokens", 4), options.pop("metric", exact), given=tuple(given), **options
    )
    monkeypatch.setitem(registry.TASKS.own, task.name, task)
    return list(read_items(grid, tokenizer, positions))
