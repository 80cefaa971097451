"""A server of a tiny decoder, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

import kvjax
from kvjax.models import Decoder
from kvjax.serve import Settings, application, listen
from kvjax.serve.server import configured
from tests.serve.serving import KEY, POLICY, Serving


@pytest.fixture(scope="session")
def serving(shallow: Decoder, talker: Any) -> Iterator[Serving]:
    settings = Settings("tiny", POLICY, api_key=KEY, max_body=20_000, timeout=30, body_timeout=4)
    with kvjax.Engine(
        shallow, POLICY, rows=3, max_prompt=32, max_new_tokens=64, tokenizer=talker, max_queue=4
    ) as engine:
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(configured(application(engine, settings), patience=60))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Serving(engine, listener.getsockname()[1])
        server.should_exit = True
        thread.join()
        listener.close()
