"""Finds a string in text that comes in pieces."""

from __future__ import annotations


class StopSearch:
    """The search of Knuth, Morris and Pratt: as many comparisons as text has characters, at most twice.

    Attributes:
        matched: the number of last characters of the text so far that are the beginning of the string.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self.matched = stop, 0
        self._borders = [0]  # of each beginning of the string: the longest shorter one that it ends with
        for letter in stop[1:]:
            self._borders.append(self._next(self._borders[-1], letter))

    def _next(self, matched: int, letter: str) -> int:
        """The number of matched characters after one more."""
        while matched and self._stop[matched] != letter:
            matched = self._borders[matched - 1]
        return matched + (self._stop[matched] == letter)

    def add(self, piece: str) -> int | None:
        """Returns where the string begins, from the beginning of this piece, so often negative; None if not yet."""
        for i, letter in enumerate(piece, 1):
            self.matched = self._next(self.matched, letter)
            if self.matched == len(self._stop):
                return i - len(self._stop)
        return None
