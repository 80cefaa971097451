"""A server that tests talk to."""

from __future__ import annotations

from dataclasses import dataclass

import openai

import kvjax

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
