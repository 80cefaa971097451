"""The bytes of an answer's tokens, joined, are its text: of byte-level and SentencePiece vocabularies, cut anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvjax.decoding.row_text import RowText
from kvjax.decoding.spelling import Spelled, Spelling
from kvjax.inspection.recording import texts_of

FACE = "\N{GRINNING FACE}"


def byte_level() -> Any:
    """256 bytes, some merges of them, one of which ends within a character, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), ("Ġ", "ð"), ("Ġð", "Ł"), ("a", "b")]
    vocab = {letter: i for i, letter in enumerate([*letters, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.ByteLevel()
    return finished(backend)


def sentencepiece() -> Any:
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁Hello", "▁world", "▁", "true", "é", "�"]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(backend)


def wordpiece() -> Any:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, ",": 4, "é": 5}))
    backend.decoder = decoders.WordPiece()
    return finished(backend)


def finished(backend: Tokenizer) -> Any:
    backend.add_tokens([AddedToken("<call>", normalized=False)])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


KINDS = {"byte_level": byte_level(), "sentencepiece": sentencepiece(), "wordpiece": wordpiece()}


def answered(tokenizer: Any, ids: list[int], stops: list[str], pieces: bool) -> tuple[str, list[Spelled]]:
    """The text of an answer, and its tokens as they are spelled: piece by piece, or at the end."""
    row, spelling = RowText(tokenizer, stops), Spelling(tokenizer)
    text, waiting, found = "", [], []
    for i, token in enumerate(ids):
        more = row.add(token, last=i == len(ids) - 1)
        text += more
        waiting.append((token, float(i)))
        if pieces and more:
            found += spelling.add(waiting, more, last=False)
            waiting = []
        if row.stopped:
            break
    return text, found + spelling.add(waiting, "" if pieces else text, last=True)


def test_a_stop_string_that_is_a_special_token() -> None:
    """The text ends before it, also where it names special tokens."""
    tokenizer = KINDS["byte_level"]
    (letter, special) = tokenizer.convert_tokens_to_ids(["a", "<s>"])
    row = RowText(tokenizer, ["<s>"], {special})
    assert (row.add(letter, last=False) + row.add(special, last=False), row.stopped) == ("a", True)


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind: str, pieces: bool) -> None:
    """Most of them form no characters, and the answer ends anywhere."""
    tokenizer, rng = KINDS[kind], np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(len(tokenizer), size=rng.integers(1, 12)).tolist()
        stops = [["a"], ["wo", "ld"], []][rng.integers(3)]
        text, found = answered(tokenizer, ids, stops, pieces)
        assert b"".join(one.data for one in found) == text.encode()
        assert [one.log_prob for one in found] == list(range(len(found)))
        assert len(found) == len(ids) or stops


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("sentencepiece", ["▁Hello", "▁world", "true"], ["Hello", " world", "true"]),
        ("sentencepiece", ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"], [b"\xf0", b"\x9f", b"\x98", b"\x80"]),
        ("sentencepiece", ["▁", "<0xC3>", "<0xA9>", "</s>"], ["", b"\xc3", b"\xa9", ""]),
        ("sentencepiece", ["true", "<0xF0>", "<0x9F>"], ["true", "", "��"]),
        ("byte_level", ["a", "Ġw", "ĠðŁ", "ĺ", "Ģ", "b"], ["a", " w", b" \xf0\x9f", b"\x98", b"\x80", "b"]),
        ("byte_level", ["ð", "</s>", "Ł", "ĺ", "Ģ"], [b"\xf0", "", b"\x9f", b"\x98", b"\x80"]),
        ("byte_level", ["<call>", "ab"], ["<call>", "ab"]),
        ("wordpiece", ["hello", "wor", "##ld", ","], ["hello", " wor", "ld", ","]),
    ],
)
def test_bytes(kind: str, names: list[str], expected: list[str | bytes]) -> None:
    tokenizer = KINDS[kind]
    text, found = answered(tokenizer, tokenizer.convert_tokens_to_ids(names), [], pieces=True)
    assert [one.data for one in found] == [x if isinstance(x, bytes) else x.encode() for x in expected]
    assert text == tokenizer.backend_tokenizer.decode(tokenizer.convert_tokens_to_ids(names))


def test_bytes_that_form_no_character() -> None:
    """SentencePiece makes one run of all bytes, of which some were returned as text before the last was known."""
    tokenizer = KINDS["sentencepiece"]
    for names, expected in (
        (["<0x43>", "<0xF0>", "<0x43>", "▁world"], "C\ufffd\ufffd world"),
        (["<0x43>", "<0xF0>", "<0x43>", "▁world", "<0xC3>"], "C\ufffd\ufffd world\ufffd"),
        (["<0x43>", "<0xF0>"], "C\ufffd"),
    ):
        for pieces in (True, False):
            assert answered(tokenizer, tokenizer.convert_tokens_to_ids(names), [], pieces)[0] == expected


def test_texts_of_tokens() -> None:
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "</s>", "<0xF0>"])
    _, found = answered(tokenizer, ids[:-1], [], pieces=False)
    assert [one.text for one in found] == ["Hello", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", "</s>"]
    assert "".join(texts_of(ids, tokenizer)) == f"Hello{FACE}</s>\ufffd"


def test_stop_strings_cut_the_last_tokens() -> None:
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "Ġw", "c", "d"])
    for pieces in (True, False):
        text, found = answered(tokenizer, ids, [" wc"], pieces)
        assert text == "ab"
        assert [(one.text, one.data) for one in found] == [("a", b"a"), ("b", b"b"), ("Ġw", b""), ("c", b"")]
