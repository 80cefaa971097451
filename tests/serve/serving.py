"""A server that tests talk to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import uvicorn

import kvjax
from kvjax.serve import Settings, application, listen
from kvjax.serve.server import configured

POLICY = "morphkv:budget=16,window=4"
KEY = "secret"


@dataclass(frozen=True)
class Serving:
    """A running server.

    Attributes:
        engine: what it answers with.
        port: where it listens.
    """

    engine: kvjax.Engine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    @property
    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def served(engine: kvjax.Engine, settings: Settings) -> Iterator[Serving]:
    """Yields a server that runs in a thread, and ends it afterwards."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(configured(application(engine, settings), patience=60))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Serving(engine, listener.getsockname()[1])
    server.should_exit = True
    thread.join()
    listener.close()
