"""Generates a text with as much haystack as fits into a length."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..task import Example, Fault, Question, Source, Task


@dataclass(frozen=True)
class Text:
    """The parts of a prompt, which is `context + question + opening`, and its references.

    White space between two parts ends the first one, as in kvpress' data set. A text that is compressed without its
    question ends with it, and the last query of the text then asks for more of the text than its last word does.
    """

    context: str
    question: str
    opening: str
    answers: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The complete prompt."""
        return self.context + self.question + self.opening


Maker = Callable[[int, random.Random, int], Text]
"""Maps (index of the example, its random generator, number of haystack units) to the text."""


@dataclass(frozen=True)
class RulerTask(Task):
    """A task of RULER."""

    generated: bool = True

    @abstractmethod
    def maker(self, source: Source, length: int) -> Maker:
        """Returns the function that makes texts for prompts of `length` tokens, after reading the files it needs."""

    @property
    @abstractmethod
    def smallest(self) -> int:
        """The smallest valid number of haystack units."""

    def available(self, source: Source) -> int:
        """The number of examples that the task can make."""
        return source.count

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        length = source.needed_length(self.name)
        room = length - self.new_tokens
        make = self.maker(source, length)

        def text(i: int, units: int) -> tuple[Text, int]:
            made = make(i, random.Random(f"{source.seed} {self.name} {length} {i}"), units)
            return made, source.tokens(made.prompt)

        start = most(lambda units: text(0, units)[1], room, self.smallest)
        if start is None:
            shortest = text(0, self.smallest)[1] + self.new_tokens
            raise ValueError(f"length={length} of {self.name}: expected at least about {shortest} tokens")
        for i in range(min(source.count, self.available(source))):
            units = start
            made, tokens = text(i, units)
            while tokens > room and units > self.smallest:
                excess = -(-(tokens - room) * units // tokens)  # in units, rounded up, as if all tokens were haystack
                units = max(self.smallest, units - excess)
                made, tokens = text(i, units)
            name = f"{length}-{i}"
            if tokens > room:
                yield Fault(name, f"{self.name}: the shortest text has {tokens} tokens; expected at most {room}")
                continue
            question = Question(made.question + made.opening, made.answers, made.opening)
            meta = {"length": length, "tokens": tokens + self.new_tokens, **made.meta}
            yield Example(name, made.context, (question,), meta)


def most(tokens: Callable[[int], int], room: int, smallest: int) -> int | None:
    """The largest number of units, at least `smallest`, whose text has at most `room` tokens; None if none fits.

    `tokens` need not be monotonic: the result fits, and the next number does not. The search first grows the number in
    proportion to the room. A text is not all haystack, so this hardly overshoots, and no text that is much longer than
    needed is made.
    """
    fits, used = smallest, tokens(smallest)
    if used > room:
        return None
    while (count := tokens(guess := max(fits + 1, fits * room // used))) <= room:
        fits, used = guess, count
    while guess - fits > 1:
        middle = (fits + guess) // 2
        if tokens(middle) <= room:
            fits = middle
        else:
            guess = middle
    return fits
