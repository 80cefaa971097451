"""Text from tokens that come one by one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tokenizers.decoders import DecodeStream

MOST_OPEN = 64  # tokens without text that are decoded anew with each one
LONGEST = 4  # bytes of a character


class TextStream:
    """Decodes tokens one by one. Joined, what it returns is the text of all tokens.

    SentencePiece decodes a run of bytes as a whole, and one byte that fits no character makes replacement characters of
    all. Text that was returned before such a byte stays as it was, as does that of the first MOST_OPEN such bytes.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool = True, shown: Collection[int] = frozenset()
    ) -> None:
        """A stream without tokens.

        Args:
            tokenizer: a fast tokenizer.
            skip_special_tokens: whether special tokens have no text.
            shown: special tokens whose text is their name all the same. Text begins anew behind them.
        """
        self._tokenizer, self._skip, self._shown = tokenizer.backend_tokenizer, skip_special_tokens, shown
        self._silent: set[int] = set()  # special tokens that came
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._tokens: list[int] = []  # of this stream
        self._texts: list[str] = []
        self._open: list[int] = []  # the last tokens, whose text was not returned

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        if token in self._silent:
            return ""
        if token in self._shown:
            text = self.end() + self._tokenizer.id_to_token(token)
            self._begin()
            return text
        waiting = [*self._open, token]
        try:
            text = self._step(token)
        except Exception:  # the text does not begin with what was returned; the library's error has no class of its own
            return self._again(waiting)
        if not text and self._is_special(token):
            self._silent.add(token)
        if len(self._open) > MOST_OPEN:
            done, rest = self._open[: 1 - LONGEST], self._open[1 - LONGEST :]
            text = self._tokenizer.decode(done, skip_special_tokens=self._skip) + self._again(rest)
        return text

    def _again(self, tokens: list[int]) -> str:
        self._begin()
        return "".join(map(self._step, tokens))

    def _is_special(self, token: int) -> bool:
        """Returns whether a token has text, which is left out."""
        left_out = not self._tokenizer.decode([token], skip_special_tokens=self._skip)
        return left_out and bool(self._tokenizer.decode([token], skip_special_tokens=False))

    def _step(self, token: int) -> str:
        self._tokens.append(token)
        self._open.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        if text:
            self._texts.append(text)
            self._open = []
        return text

    def end(self) -> str:
        """The text of the last tokens, if they form no complete character."""
        full = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)
        returned = "".join(self._texts)
        if full.startswith(returned):
            return full[len(returned) :]
        return self._tokenizer.decode(self._open, skip_special_tokens=self._skip)
