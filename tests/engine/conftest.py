"""Engines that tests of several files ask, because starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.models import Decoder
from tests.serve.fuzzing import tokenizer as of_bytes
from tests.serve.serving import POLICY, SIZES
from tests.tiny import decoder


@pytest.fixture(scope="session")
def engine(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> Iterator[kvjax.Engine]:
    """A guided engine of three rows, with the programs of the server's tests."""
    with kvjax.Engine(shallow, POLICY, **SIZES, max_queue=3, tokenizer=tokenizer, guided=True) as engine:
        yield engine
        engine.close(drain=False)


@pytest.fixture(scope="session")
def of_258() -> Decoder:
    """A decoder of bytes and two more tokens."""
    return decoder(vocab=258)


@pytest.fixture(scope="session")
def guided(of_258: Decoder) -> Iterator[kvjax.Engine]:
    """An engine of three rows that accepts guided requests, with a prompt of 16 bytes and an answer of 48."""
    options = {"rows": 3, "max_prompt": 16, "max_new_tokens": 48, "chunk": 16, "steps_at_once": 4}
    with kvjax.Engine(of_258, tokenizer=of_bytes(), guided=True, **options) as engine:
        yield engine
