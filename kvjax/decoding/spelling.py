"""The bytes of an answer's text that each of its tokens adds."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from .row_text import special_ids
from .text_stream import TextStream

BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece that is one byte


class Spelled(NamedTuple):
    """A token and what it adds to the text.

    Attributes:
        text: the bytes as text. Part of a character is written as "bytes:\\xf0\\x9f", and a token that adds nothing,
            such as an end token, by its name in the vocabulary.
        data: the bytes.
        log_prob: as given.
    """

    text: str
    data: bytes
    log_prob: float | None


class Spelling:
    """Divides the text of one answer among its tokens: joined, their bytes are the text in UTF-8.

    A token alone has no text: SentencePiece drops the space of the first word, and a character may take several tokens.
    The tokens of a character share its bytes as the vocabulary does. If bytes form no character, the text has
    replacement characters, and the last of these tokens adds them.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = frozenset()) -> None:
        """An answer without tokens, whose text names the special tokens `shown`."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = frozenset(special_ids(tokenizer).values()) - frozenset(shown)
        self._stream = TextStream(tokenizer, shown=shown)
        self._open: list[tuple[int, float | None]] = []  # tokens of a character that is not complete
        self._sized: deque[tuple[int, float | None, int]] = deque()  # tokens and the number of their bytes
        self._text = bytearray()  # that is certain, and not given to a token

    def add(self, tokens: Iterable[tuple[int, float | None]], text: str, *, last: bool) -> list[Spelled]:
        """The tokens whose text is certain, in order, after some more tokens and more certain text.

        Args:
            tokens: ids and log-probabilities.
            last: whether the answer ends. All tokens are returned, and what a stop string has cut off is in none.
        """
        self._text += text.encode()
        for token, log_prob in tokens:
            self._open.append((token, log_prob))
            if decoded := self._stream.add(token):
                self._close(len(decoded.encode()))
        if last:
            self._close(max(0, len(self._text) - sum(size for _, _, size in self._sized)))
        found = []
        while self._sized and (last or self._sized[0][2] <= len(self._text)):
            token, log_prob, size = self._sized.popleft()
            found.append(Spelled(self._named(token, data := bytes(self._text[:size])), data, log_prob))
            del self._text[:size]
        return found

    def _close(self, total: int) -> None:
        """Gives the open tokens their numbers of bytes, whose sum is `total`."""
        sizes = [self._size(token) for token, _ in self._open]
        if sum(sizes) == total + 1 and sizes[0] == 1:
            sizes[0] = 0  # the space of the first word
        if sum(sizes) != total and sizes:
            at = max((i for i, size in enumerate(sizes) if size), default=len(sizes) - 1)
            sizes = [total if i == at else 0 for i in range(len(sizes))]
        self._sized += [(*token, size) for token, size in zip(self._open, sizes, strict=True)]
        self._open = []

    def _size(self, token: int) -> int:
        """The number of bytes of a token that is part of a character: in byte-level vocabularies one per letter."""
        name = "" if token in self._special else self._tokenizer.id_to_token(token) or ""
        return 1 if BYTE.fullmatch(name) else len(name)

    def _named(self, token: int, data: bytes) -> str:
        if not data:
            return self._tokenizer.id_to_token(token) or ""
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode(errors="backslashreplace")


def alone(tokenizer: Any, token: int) -> str:
    """The text of a token by itself. Part of a character, and a token that adds nothing, has its vocabulary's name."""
    backend = tokenizer.backend_tokenizer
    text = backend.decode([token], skip_special_tokens=False)
    return text if text and "\ufffd" not in text else backend.id_to_token(token) or ""
