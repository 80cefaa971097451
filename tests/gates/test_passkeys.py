"""Texts with pass keys: every key is stated once and recited once, and nothing else of the window changes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvjax.evaluation.tasks.vocabulary import decode, encode, tokenizer
from kvjax.files.texts import Stream
from kvjax.gates.passkeys import DEMO, ENGLISH, KEYS, PassKeys, wording_of

BEGIN = 7  # not a letter of any text
DATA = "The ship left at noon. " * 100
WORDS = "the baker trusts . the ocean reaches the meadow . " * 60


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


class Unknowing(Bytes):
    """One that loses digits."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [byte for byte in super().encode(text, add_special_tokens) if not chr(byte).isdigit()]

    def decode(self, ids: list[int]) -> str:
        return super().decode(ids).replace("code", "?")


@pytest.mark.parametrize("seed", range(5))
def test_a_text_in_english(seed: int) -> None:
    stream, rng = Stream(np.array(list(DATA.encode()), np.int32), begin=(BEGIN,)), np.random.default_rng(seed)
    keys = PassKeys.drawn(ENGLISH, Bytes(), rng)
    tokens, recited = keys.woven(stream, 1500, rng)
    assert tokens.shape == recited.shape == (1500,)
    assert tokens[0] == BEGIN
    body, question, recital = Bytes().decode(tokens[1:].tolist()).partition("\n\nWhat are the pass keys?\n\n")
    assert question
    assert Bytes().decode(tokens[recited].tolist()) == recital
    assert not recited[: -len(recital)].any()
    form = re.compile(r" The pass key of the (\w+) is (\d{5})\.")
    stated, said = form.findall(body), form.findall(recital)
    assert form.sub("", recital) == ""
    assert sorted(stated) == sorted(said)
    assert len(stated) == len(dict(stated)) == len({key for _, key in stated}) == KEYS
    assert form.sub("", body) in DATA  # the window, around the statements
    assert keys.size == 1500 - 1 - len(form.sub("", body))


def test_orders_and_places_differ() -> None:
    """The recital has another order than the statements, which are all over the text."""
    stream, places, orders = Stream(np.array(list(DATA.encode()), np.int32)), [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = bytes(PassKeys.drawn(ENGLISH, Bytes(), rng).woven(stream, 2000, rng)[0].tolist()).decode()
        body, _, recital = text.partition("\n\nWhat")
        names = re.findall(r"the (\w+) is", recital)
        orders.append(names == re.findall(r"pass key of the (\w+)", body))
        places += [match.start() / len(body) for match in re.finditer("The pass key", body)]
    assert not any(orders)
    assert min(places) < 0.05
    assert max(places) > 0.9
    assert abs(np.mean(places) - 0.5) < 0.1


def test_a_text_in_the_words_of_the_demo_model() -> None:
    stream, rng = Stream(encode(WORDS)), np.random.default_rng(0)
    tokens, recited = PassKeys.drawn(DEMO, tokenizer(), rng).woven(stream, 300, rng)
    text = decode(tokens)
    stated = re.findall(r"the code of (\w+) is (\w+) \.", text)
    asked = re.findall(r"recall what the code of (\w+) is : (\w+) is (\w+) \.", text)
    assert len(stated) == KEYS
    assert sorted(stated) == sorted((name, key) for _, name, key in asked)
    assert all(question == name for question, name, _ in asked)
    assert decode(tokens[recited]) == " ".join(f"{name} is {key} ." for _, name, key in asked)
    rest = re.sub(r"the code of \w+ is \w+ \. ", "", text)
    assert rest[: rest.index(" recall")] in WORDS


def test_the_wording_is_one_that_the_tokenizer_writes() -> None:
    assert wording_of(Bytes()) is ENGLISH
    assert wording_of(tokenizer()) is DEMO
    with pytest.raises(ValueError, match=r"expected one that .* decodes 'The pass key of the apple is 10000\.'"):
        wording_of(Unknowing())
