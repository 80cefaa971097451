"""RULER's aggregation tasks: the most common words of a list and the most frequent words of a coded text."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..files import Record, parse, read
from ..haystack import words
from ..task import DataError, Source
from .text import Maker, RulerTask, Text

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list? "
COMMON_OPENING = "Answer: The top 10 words that appear most often in the list are:"
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
)
FREQUENT_OPENING = "Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """A list with ten words thirty times each and the others three times; below 4,096 tokens, six times and once."""

    common: int = 10

    @property
    def smallest(self) -> int:
        return self.common + 1

    def maker(self, source: Source, length: int) -> Maker:
        short = length < 4096
        known = sorted({word for kind in ("noun", "adjective", "verb") for word in words(kind)})

        def listed(rng: random.Random, units: int, often: int, rarely: int) -> tuple[str, list[str]]:
            drawn = rng.sample(known if units <= len(known) else english_words(source.folder, units), units)
            common, uncommon = drawn[: self.common], drawn[self.common :]
            order = common * often + uncommon * rarely
            rng.shuffle(order)
            return " ".join(f"{i}. {word}" for i, word in enumerate(order, 1)), common

        def make(i: int, rng: random.Random, units: int) -> Text:
            listing, solution = listed(rng, *((20, 3, 1) if short else (40, 10, 3)))
            answer = " ".join(f"{n}. {word}" for n, word in enumerate(solution, 1))
            example = f"{COMMON.format(context=listing)}{COMMON_QUESTION}{COMMON_OPENING} {answer}"
            context, common = listed(rng, units, *((6, 1) if short else (30, 3)))
            return Text(f"{example}\n{COMMON.format(context=context)}", COMMON_QUESTION, COMMON_OPENING, tuple(common))

        return make


def english_words(folder: Path | None, needed: int) -> list[str]:
    """RULER's longer list of words, from its file. Raises DataError if the file is missing or has too few words."""
    path = None if folder is None else folder / "english_words.json"
    if path is None or not path.exists():
        where = "no folder is given" if path is None else f"{folder} has none"
        raise DataError(
            f"a list of {needed} different words is longer than wonderwords' lists: expected RULER's "
            f"english_words.json in the data folder (--data); {where}"
        )
    found = _english_words(path)
    if len(found) < needed:
        raise DataError(f"{path} has {len(found)} different words; expected at least {needed}")
    return found


@cache
def _english_words(path: Path) -> list[str]:
    """The values of {"1": "a word", ...}, without repetition."""
    fields = Record.of(path.name, parse(path.name, read(path))).fields
    return list(dict.fromkeys(str(word) for word in fields.values()))


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """A text of invented words. Word k is a share of 1 / (zeta(2) k^2), zeta(2) = pi^2 / 6, and word 1 is dots."""

    letters: int = 6

    @property
    def smallest(self) -> int:
        return 100  # with fewer units, the third and the fourth word have equal counts

    def maker(self, source: Source, length: int) -> Maker:
        size = max((length - self.new_tokens) // 50, 5)
        shares = 6 / (np.pi * np.arange(1, size + 1)) ** 2

        def make(i: int, rng: random.Random, units: int) -> Text:
            coded: dict[str, None] = {}
            while len(coded) < size:
                coded["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
            vocabulary = ["...", *list(coded)[1:]]
            counts = (units * shares).astype(int)
            text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
            rng.shuffle(text)
            context = FREQUENT.format(context=" ".join(text))
            return Text(context, FREQUENT_QUESTION, FREQUENT_OPENING, tuple(vocabulary[1:4]))

        return make
