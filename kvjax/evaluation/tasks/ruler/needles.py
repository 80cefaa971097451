"""RULER's needle tasks: keys with values, hidden in repeated sentences, in essays or among other needles."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..haystack import SENTENCE_END, essays, sentences, words
from ..task import Source
from .text import Maker, RulerTask, Text

CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text? "
OPENING = "The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, num=40)))

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles(RulerTask):
    """One of the eight needle tasks.

    Attributes:
        haystack: repeated noise sentences, the beginning of the essays, their text from a sentence that each prompt
            draws, or other needles.
        keys: the kind of the keys.
        values: the kind of the values.
        keys_hidden: the number of keys in the text.
        values_of_each: the number of values of each key.
        keys_asked: the number of keys in the question.
    """

    haystack: Literal["noise", "beginning", "anywhere", "needle"] = "noise"
    keys: Kind = "words"
    values: Kind = "numbers"
    keys_hidden: int = 1
    values_of_each: int = 1
    keys_asked: int = 1

    @property
    def smallest(self) -> int:
        return self.keys_hidden * self.values_of_each

    def maker(self, source: Source, length: int) -> Maker:
        essay = essays(source).split() if self.haystack in ("beginning", "anywhere") else []
        starts = beginnings(essay) if self.haystack == "anywhere" else []

        def make(i: int, rng: random.Random, units: int) -> Text:
            hidden = [
                (draw(self.keys, rng), [draw(self.values, rng) for _ in range(self.values_of_each)])
                for _ in range(self.keys_hidden)
            ]
            needles = [self._needle(key, value) for key, values in hidden for value in values]
            rng.shuffle(needles)
            if essay:
                at = rng.choice(starts) if starts else 0
                context = among_sentences(needles, essay[at:] + essay[:at], units, rng)
            else:
                context = among_lines(needles, self._lines(units, rng), rng)
            asked = rng.sample(hidden, self.keys_asked)
            return self._text(context, [key for key, _ in asked], [value for _, values in asked for value in values])

        return make

    def _lines(self, units: int, rng: random.Random) -> list[str]:
        if self.haystack == "noise":
            return [NOISE] * units
        return [self._needle(draw(self.keys, rng), draw(self.values, rng)) for _ in range(units)]

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.values, key=key, value=value)

    def _text(self, context: str, keys: list[str], values: list[str]) -> Text:
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        if len(values) > 1:
            parts, kind, meta = (CONTEXT, QUESTION, OPENING), str(self.values), {}
        else:
            parts, kind = (singular(CONTEXT), singular(QUESTION), singular(OPENING)), self.values.removesuffix("s")
            meta = {"depth": round(context.find(values[0]) / len(context), 3)}
        before, question, opening = (part.format(kind=kind, query=query, context=context) for part in parts)
        return Text(before, question, opening, tuple(values), meta)


def singular(part: str) -> str:
    """The singular form of a template, as RULER derives it."""
    return part.replace("Some", "A").replace("are all", "is").replace("are", "is")


def draw(kind: Kind, rng: random.Random) -> str:
    """A random key or value."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"


def among_lines(needles: list[str], lines: list[str], rng: random.Random) -> str:
    """The lines with the needles inserted at random places. Changes `lines`."""
    for at, needle in zip(sorted(rng.sample(range(len(lines)), len(needles)), reverse=True), needles, strict=True):
        lines.insert(at, needle)
    return "\n".join(lines)


def beginnings(text: list[str]) -> list[int]:
    """The words of a repeated text that begin a sentence; without any, the first word."""
    return [at for at, word in enumerate(text) if SENTENCE_END.search(f"{text[at - 1]} {word}")] or [0]


def among_sentences(needles: list[str], essay: list[str], units: int, rng: random.Random) -> str:
    """The first `units` words of the repeated essays, with the needles between their sentences."""
    hay = sentences(" ".join((essay * -(-units // len(essay)))[:units]))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    places = [0, *(len(hay) * depth // 100 for depth in depths), len(hay)]
    pieces = []
    for needle, start, stop in zip([*needles, None], places[:-1], places[1:], strict=True):
        pieces.append(" ".join(hay[start:stop]))
        if needle is not None:
            pieces.append(needle)
    return " ".join(pieces)
