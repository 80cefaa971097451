"""Text from tokens that come one by one."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes tokens one by one. Joined, what it returns is the text of all tokens.

    SentencePiece decodes a run of bytes as a whole, and one byte that fits no character makes replacement characters of
    all. Text that was returned before such a byte stays as it was.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._tokens: list[int] = []  # of this stream
        self._texts: list[str] = []
        self._open: list[int] = []  # the last tokens, whose text was not returned

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        waiting = [*self._open, token]
        try:
            return self._step(token)
        except Exception:  # the text does not begin with what was returned; the library's error has no class of its own
            self._begin()
            return "".join(map(self._step, waiting))

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
