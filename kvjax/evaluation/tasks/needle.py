"""Needle in a haystack: one sentence hidden at a depth of the essays, over a grid of lengths and depths.

Needle, question and prompt are those of gkamradt/LLMTest_NeedleInAHaystack (MIT), where a judge marks the answers. Here
the headline score is the recall of the expected words. ROUGE-1 F1, which papers on KV caches report, is the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvjax.evaluation import metrics

from .haystack import essays
from .task import Example, Question, Scores, Source, Task

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
QUESTION = "What is the best thing to do in San Francisco?"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
BEFORE = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n"
)
AFTER = f"\n</context>\n\n{QUESTION} Don't give information outside the document or repeat your findings"
OPENING = "\n\nHere is the most relevant sentence in the context:"
BUFFER = 200
"""The number of tokens of the length that are reserved for the question and the answer."""


def found(prediction: str, question: Question) -> Scores:
    """The recall of the expected words, and ROUGE-1 F1."""
    said, expected = metrics.normalized(prediction).split(), metrics.normalized(ANSWER).split()
    recall = sum(word in said for word in expected) / len(expected)
    return {"recall": recall, "rouge1": metrics.rouge(prediction, [NEEDLE.strip()])["rouge1"]}


@dataclass(frozen=True)
class Needle(Task):
    """Needles at `depths` depths from 0 to 100 percent of one length.

    Haystack and needle have `length - 200` tokens together. The needle follows the last full stop before its depth. If
    there are more examples than depths, further examples use other parts of the essays.
    """

    generated: bool = True
    depths: int = 11

    def examples(self, source: Source) -> Iterator[Example]:
        length = source.needed_length(self.name)
        needle, stops = source.ids(NEEDLE), set(source.ids("."))
        size = length - BUFFER - len(needle)
        if size < 1:
            raise ValueError(f"length={length} of {self.name}: expected at least {BUFFER + len(needle) + 1} tokens")
        hay = source.ids(essays(source))
        percents = np.linspace(0, 100, self.depths)
        for i in range(source.count):
            percent, turn = float(percents[i % self.depths]), i // self.depths
            start = turn * size % len(hay)
            taken = (hay[start:] + hay * (size // len(hay) + 1))[:size]
            at = size if percent == 100 else int(size * percent / 100)
            while 0 < at < size and taken[at - 1] not in stops:
                at -= 1
            context = source.tokenizer.decode(taken[:at] + needle + taken[at:], skip_special_tokens=True)
            meta = {"length": length, "depth": round(percent / 100, 4)}
            name = f"{length}-{percent:g}%" + (f"-{turn}" if turn else "")
            yield Example(name, BEFORE + context, (Question(AFTER + OPENING, (ANSWER,), OPENING),), meta)


TASKS = tuple(Needle(f"needle/{depths}", 300, found, depths=depths) for depths in (11, 35))
