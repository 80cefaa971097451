"""Making a text of a length: as much haystack as fits."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..task import Example, Fault, Question, Source, Task


@dataclass(frozen=True)
class Text:
    """A prompt in its parts: `context + question + opening`."""

    context: str
    question: str
    opening: str
    answers: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.opening


Maker = Callable[[int, random.Random, int], Text]
"""(number of the example, its random numbers, units of haystack) -> its text."""


@dataclass(frozen=True)
class RulerTask(Task):
    """A task of RULER."""

    generated: bool = True

    @abstractmethod
    def maker(self, source: Source, length: int) -> Maker:
        """What makes texts for prompts of `length` tokens; reads the files it needs."""

    @property
    @abstractmethod
    def smallest(self) -> int:
        """The fewest units of haystack that make sense."""

    def available(self, source: Source) -> int:
        """How many examples there are."""
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
            raise ValueError(f"{self.name} needs a length of about {shortest} tokens at least; length={length}")
        for i in range(min(source.count, self.available(source))):
            units = start
            made, tokens = text(i, units)
            while tokens > room and units > self.smallest:
                excess = -(-(tokens - room) * units // tokens)  # were all tokens haystack; in units, rounded up
                units = max(self.smallest, units - excess)
                made, tokens = text(i, units)
            name = f"{length}-{i}"
            if tokens > room:
                yield Fault(name, f"{self.name}: the shortest text has {tokens} tokens, where {room} fit")
                continue
            question = Question(made.question + made.opening, made.answers, made.opening)
            meta = {"length": length, "tokens": tokens + self.new_tokens, **made.meta}
            yield Example(name, made.context, (question,), meta)


def most(tokens: Callable[[int], int], room: int, smallest: int) -> int | None:
    """The most units, `smallest` or more, whose text has at most `room` tokens; None if there are none.

    `tokens` may waver a little as units grow: found is a number that fits while the next one does not. As haystack is
    not all of a text, growing in proportion hardly overshoots; so no text much longer than needed is made.
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
