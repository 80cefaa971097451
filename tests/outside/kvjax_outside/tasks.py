"""A task whose texts are of the demo model's words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvjax.evaluation.tasks.task import Example, Question, Scores, Source, Task

WORDS = ("lamp", "river", "stone", "door")


def first_word(prediction: str, question: Question) -> Scores:
    """1 if the first word of the answer is the reference's."""
    return {"first_word": float(prediction.split()[:1] == [question.answers[0]])}


@dataclass(frozen=True)
class Codes(Task):
    """One name and its code, among repetitions of a sentence."""

    def examples(self, source: Source) -> Iterator[Example]:
        for i in range(source.count):
            word = WORDS[i % len(WORDS)]
            context = f"the code of anna is {word} . " + "the tall king finds the door . " * 4
            yield Example(str(i), context, (Question(" the code of anna is", (word,)),))


TASKS = (Codes("outside/codes", 2, first_word, generated=True),)
