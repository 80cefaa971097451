"""Tokens that add no text, however many come."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.decoders import DecodeStream

from kvjax.decoding import text_stream
from kvjax.decoding.text_stream import TextStream
from tests.decoding.test_spelling import KINDS


class Counted:
    """The library's stream, which decodes with each token all tokens since its last text. `most`: how many."""

    most = 0

    def __init__(self, **options: Any) -> None:
        self._stream, self._since = DecodeStream(**options), 0

    def step(self, tokenizer: Any, token: int) -> str | None:
        text = self._stream.step(tokenizer, token)
        self._since = 0 if text else self._since + 1
        Counted.most = max(Counted.most, self._since)
        return text


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("sentencepiece", ["▁Hello", *["</s>"] * 1000, "▁world"], "Hello world"),
        ("sentencepiece", ["▁Hello", *["<s>", "</s>"] * 500, "▁world"], "Hello world"),
        ("sentencepiece", ["▁Hello", *["<0xF0>"] * 1000, "▁world"], "Hello" + "\ufffd" * 1000 + " world"),
        ("sentencepiece", ["▁Hello", *["<0xF0>"] * 1000], "Hello" + "\ufffd" * 1000),
        ("byte_level", ["a", *["ð"] * 1000, "Ł", "ĺ", "Ģ", "Ġw"], "a" + "\ufffd" * 999 + "\N{GRINNING FACE} w"),
        ("byte_level", ["a", *["ð", "Ł", "ĺ", "Ģ"] * 250], "a" + "\N{GRINNING FACE}" * 250),
    ],
)
def test_tokens_without_text(kind: str, names: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "DecodeStream", Counted)
    Counted.most = 0
    stream = TextStream(KINDS[kind])
    found = [stream.add(token) for token in KINDS[kind].convert_tokens_to_ids(names)]
    assert "".join(found) + stream.end() == expected
    assert Counted.most <= text_stream.MOST_OPEN + 1
