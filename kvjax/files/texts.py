"""Texts that gates are trained on and statistics measured on: windows of a stream of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.checks import path_of, shown
from kvjax.files.reading import read_text
from kvjax.runtime.progress import tell

MOST = 2**33  # bytes of a file


@dataclass(frozen=True)
class Stream:
    """Tokens of all texts, one after the other.

    Attributes:
        tokens: the token ids.
        begin: what every window begins with: the tokenizer's first special token, if it has one.
        ends: where texts end: the number of tokens up to the end of each. Empty for one text.
    """

    tokens: Int[np.ndarray, "T"]
    begin: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def facts(self) -> str:
        """The number of tokens, and a hash of all that windows are drawn from."""
        parts = (np.asarray(part, np.int64).tobytes() for part in (self.tokens, self.begin, self.ends))
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
        return f"{len(self.tokens):,} tokens, hash {digest}"

    def windows(self, count: int, length: int, rng: np.random.Generator) -> Int[np.ndarray, "B N"]:
        """Draws `count` windows of `length` tokens at random places."""
        own = length - len(self.begin)
        return self._from(rng.integers(0, len(self.tokens) - own + 1, count), own)

    def endings(self, count: int, length: int, rng: np.random.Generator) -> Int[np.ndarray, "B N"]:
        """Draws `count` windows of `length` tokens that end where a text ends; before a short text is another."""
        own = length - len(self.begin)
        ends = np.array(self.ends or (len(self.tokens),))
        return self._from(rng.choice(ends[ends >= own], count) - own, own)

    def _from(self, firsts: Int[np.ndarray, "B"], own: int) -> Int[np.ndarray, "B N"]:
        return np.stack([np.concatenate([self.begin, self.tokens[i : i + own]]) for i in firsts]).astype(np.int32)


def read_stream(path: str | Path, tokenizer: Any, least: int) -> Stream:
    """Reads a text file, or all files *.txt of a folder in alphabetical order.

    Args:
        path: the file or folder, in UTF-8.
        tokenizer: encodes the texts.
        least: the number of tokens that the stream must have.

    Raises:
        ValueError: there is no text, a file is a device, too large or not UTF-8, or the texts are shorter than `least`
            tokens.
        OSError: a file cannot be read.
    """
    tokens: list[int] = []
    ends: list[int] = []
    files = text_files(path)
    for i, file in enumerate(files):
        tell("reading texts", i, len(files), "files")
        tokens += tokenizer.encode(read_text(file, MOST, "a text file"), add_special_tokens=False)
        ends.append(len(tokens))
    if len(tokens) < least:
        raise ValueError(f"data={shown(str(path))} has {len(tokens):,} tokens: expected {least:,} or more, the length")
    begin = () if getattr(tokenizer, "bos_token_id", None) is None else (tokenizer.bos_token_id,)
    return Stream(np.array(tokens, np.int32), begin, tuple(ends))


def text_files(path: str | Path) -> list[Path]:
    """Returns the files of `read_stream`. Raises ValueError if there are none."""
    path = path_of("data", path)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise ValueError(f"data={shown(str(path))}: expected a text file, or a folder with files *.txt")
    return files
