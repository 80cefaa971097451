"""The text of one row while its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvjax.checks import shown

from .text_stream import TextStream

LONGEST_STOP = 1000  # characters; the text that is held back and searched at every token grows with a stop string


def stop_strings(stop: str | Sequence[str], tokenizer: Any) -> list[str]:
    """The strings that end a row. Raises ValueError for others, and without a fast tokenizer if there are any."""
    stops: list[Any] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, list | tuple) else [None]
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={shown(stop)}: expected strings of at least one character")
    if any(len(s) > LONGEST_STOP for s in stops):
        raise ValueError(f"stop={shown(stop)}: expected strings of at most {LONGEST_STOP:,} characters")
    if stops and tokenizer is None:
        raise ValueError(
            f"stop={shown(stop)} and there is no tokenizer: expected tokenizer=, because stop strings are text"
        )
    special = special_ids(tokenizer) if stops else {}
    for text in stops:
        if inside := [name for name in special if name in text and name != text]:
            raise ValueError(
                f"stop={shown(text)} has the special token {inside[0]} within other text, which no answer shows: "
                "expected the special token alone, or text without it"
            )
        if text != text.encode(errors="ignore").decode():
            raise ValueError(f"stop={shown(text)} has a lone surrogate, which no answer has: expected text in UTF-8")
        if text not in special and (never := _unspelled(text, tokenizer, special)):
            raise ValueError(
                f"stop={shown(text)} has {shown(never)}, which no token of the tokenizer has: expected text that an "
                "answer may have"
            )
    if stops:
        check_fast(tokenizer)
    return stops


def _unspelled(text: str, tokenizer: Any, special: Collection[str]) -> str | None:
    """A character of a text that is unknown to the tokenizer and in none of its tokens; None if there is none."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return None
    found = [c for c in dict.fromkeys(text) if unknown in tokenizer(c, add_special_tokens=False)["input_ids"]]
    # A part of a word is unknown alone, and known within the word.
    known = set().union(*(token for token in tokenizer.get_vocab() if token not in special)) if found else set()
    return next((c for c in found if c not in known), None)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the special tokens, which the text of an answer leaves out, by their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: i for i, token in added.items() if token.special and token.content}


def shown_ids(names: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens. Raises ValueError for other names."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"shown_tokens={shown(names)}: expected a list of special tokens")
    special = special_ids(tokenizer) if names else {}
    if unknown := [name for name in names if name not in special]:
        expected = f"expected special tokens of the tokenizer, which are {shown([*special])}"
        raise ValueError(f"shown_tokens has {shown(unknown[0])}: {expected}")
    return frozenset(special[name] for name in names)


def check_fast(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that cannot decode token by token."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__} without backend_tokenizer: expected a fast tokenizer of "
            "transformers, which decodes token by token; kvjax.generate takes others too"
        )


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


class RowText:
    """Decodes the text of one row token by token and cuts it before the first stop string."""

    def __init__(self, tokenizer: Any, stops: list[str], shown: Collection[int] = frozenset()) -> None:
        """A row without tokens.

        Args:
            tokenizer: a fast tokenizer.
            stops: strings of `stop_strings`.
            shown: special tokens that the text names.
        """
        self._stream = TextStream(tokenizer, shown=shown)
        special = special_ids(tokenizer) if stops else {}
        self._ends = {special[stop] for stop in stops if stop in special}
        self._stops = [StopSearch(stop) for stop in stops if stop not in special]
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool) -> str:
        """Returns the text that is certain after one more token (-1 for none).

        After the last token of a row that is all text that was held back.
        """
        if token < 0 or self.stopped:
            return ""
        held, self._held = self._held, ""
        if token in self._ends:
            self.stopped = True
            return held + self._stream.end()
        text = self._stream.add(token)
        if last:
            text += self._stream.end()
        found = [at for at in (stop.add(text) for stop in self._stops) if at is not None]
        if found:
            self.stopped = True
            return (held + text)[: len(held) + min(found)]
        keep = 0 if last else max((stop.matched for stop in self._stops), default=0)
        certain = len(held) + len(text) - keep
        self._held = (held + text)[certain:]
        return (held + text)[:certain]
