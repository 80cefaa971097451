"""A server of a tiny decoder, in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvjax
from kvjax.models import Decoder
from kvjax.serve import Settings
from tests.patience import PATIENCE
from tests.serve.serving import KEY, POLICY, SIZES, Serving, only, served


@pytest.fixture(scope="session")
def serving(shallow: Decoder, talker: Any) -> Iterator[Serving]:
    settings = Settings(api_key=KEY, max_body=20_000, timeout=PATIENCE, body_timeout=4)
    with kvjax.Engine(shallow, POLICY, **SIZES, tokenizer=talker, max_queue=4, guided=True) as engine:
        yield from served(only(engine), settings)
