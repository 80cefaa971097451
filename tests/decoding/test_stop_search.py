"""A stop string is found where `str.find` finds it, in time that does not grow with its length."""

from __future__ import annotations

import random
from typing import SupportsIndex

import pytest

from kvjax.decoding.row_text import StopSearch


def test_random_texts() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        stop = "".join(rng.choices("ab", k=rng.randint(1, 6)))
        text, search, given, found = "".join(rng.choices("ab", k=30)), StopSearch(stop), 0, None
        while given < len(text) and found is None:
            piece = text[given : given + rng.randint(0, 5)]
            found = search.add(piece)
            at = None if found is None else given + found
            given += len(piece)
            if found is None:
                assert search.matched == max(n for n in range(len(stop)) if text[:given].endswith(stop[:n]))
        assert (-1 if found is None else at) == text.find(stop)


class Counted(str):
    """A string that counts how often a character is looked at."""

    looks = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        Counted.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("stop", ["x" * 999 + "y", "xy" * 499 + "xx", "y" + "x" * 999])
def test_comparisons(stop: str) -> None:
    search, Counted.looks = StopSearch(Counted(stop)), 0
    for _ in range(1000):
        search.add("xxx")
    assert Counted.looks <= 4 * 3000
