"""The text of one row while its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvjax.checks import shown

LONGEST_STOP = 1000  # characters; the text that is held back and searched at every token grows with a stop string


def stop_strings(stop: str | Sequence[str], tokenizer: Any) -> list[str]:
    """The strings that end a row. Raises ValueError for others, and without a tokenizer."""
    stops: list[Any] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, list | tuple) else [None]
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={shown(stop)}: expected strings of at least one character")
    if any(len(s) > LONGEST_STOP for s in stops):
        raise ValueError(f"stop={shown(stop)}: expected strings of at most {LONGEST_STOP:,} characters")
    if stops and tokenizer is None:
        raise ValueError(
            f"stop={shown(stop)} and there is no tokenizer: expected tokenizer=, because stop strings are text"
        )
    special = _special_ids(tokenizer) if stops else {}
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


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the special tokens, which the text of an answer leaves out, by their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: i for i, token in added.items() if token.special and token.content}


def check_fast(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that cannot decode token by token."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__} without backend_tokenizer: expected a fast tokenizer of "
            "transformers, which decodes token by token; kvjax.generate takes others too"
        )


class RowText:
    """Decodes the text of one row token by token and cuts it before the first stop string."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        special = _special_ids(tokenizer) if stops else {}
        self._ends = {special[stop] for stop in stops if stop in special}
        self._stops = [stop for stop in stops if stop not in special]
        self._tokens: list[int] = []
        self._decoded = ""
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool) -> str:
        """Returns the text that is certain after one more token (-1 for none).

        After the last token of a row that is all text that was held back.
        """
        if token < 0 or self.stopped:
            return ""
        self._tokens.append(token)
        last |= token in self._ends
        text = self._decoder.step(self._tokenizer, token) or ""
        self._decoded += text
        if last:  # the tokenizer has a text for bytes that do not form a character
            full = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            text += full[len(self._decoded) :] if full.startswith(self._decoded) else ""
        self._held += text
        if token in self._ends:
            self.stopped = True
            return self._held
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = 0 if last else max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def _overlap(self, stop: str) -> int:
        """Returns the number of last characters of the held text that may be the beginning of a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
