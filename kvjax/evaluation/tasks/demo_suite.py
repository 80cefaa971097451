"""The family `demo/`: the tasks of `demo` as texts of exactly `Source.length` tokens with several questions each."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import demo
from .task import Example, Question, Scores, Source, Task
from .vocabulary import decode


def exact(prediction: str, question: Question) -> Scores:
    """1 if the words of the answer equal those of the reference. An answer without an end token is longer."""
    return {"exact_match": float(prediction.split() == question.answers[0].split())}


@dataclass(frozen=True)
class DemoTask(Task):
    """A task of the demo model.

    Attributes:
        questions: the largest number of questions per text, which are drawn at random.
    """

    shown: bool = True
    questions: int = 4

    def examples(self, source: Source) -> Iterator[Example]:
        kind = self.name.removeprefix("demo/")
        length = source.needed_length(self.name)
        for i in range(source.count):
            rng = np.random.default_rng([source.seed, zlib.crc32(kind.encode()), length, i])
            text = demo.document(kind, length, rng)
            asked = sorted(rng.permutation(len(text.questions))[: self.questions])
            questions = tuple(
                Question(f" {decode(question)}", (decode(answer),))
                for question, answer in (text.questions[q] for q in asked)
            )
            yield Example(f"{length}-{i}", decode(text.context), questions, {"length": length})


TASKS = tuple(DemoTask(f"demo/{name}", 16, exact, generated=True) for name in demo.TASKS)
