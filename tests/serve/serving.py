"""A server that tests talk to."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

import kvjax
from kvjax.serve import Model, Models, Settings, application, listen
from kvjax.serve.server import configured
from tests.patience import PATIENCE

# Engines with this policy and these sizes share what is compiled.
POLICY = "morphkv:budget=16,window=4"
SIZES: Any = {"rows": 3, "max_prompt": 16, "max_new_tokens": 512}
KEY = "secret"
GOOD = {"model": "tiny", "prompt": "ba", "max_tokens": 2}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "ba"}], "max_tokens": 2}


@dataclass(frozen=True)
class Serving:
    """A running server.

    Attributes:
        engine: what the first model answers with.
        port: where it listens.
    """

    engine: kvjax.Engine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)

    @property
    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)


OPEN = Settings()


def only(engine: kvjax.Engine, policy: str = POLICY, name: str = "tiny") -> Models:
    """The models of a server that has one."""
    return Models([Model(name, policy, engine)])


def served(models: Models, settings: Settings = OPEN) -> Iterator[Serving]:
    """Yields a server that runs in a thread, and ends it afterwards."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(configured(application(models, settings), patience=PATIENCE))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Serving(models.default.engine, listener.getsockname()[1])
    server.should_exit = True
    thread.join()
    listener.close()


def send(serving: Serving, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the document of an answer; a body is sent as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    default = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    named = default | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(serving.url + path, data, named)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def metrics(serving: Serving) -> list[str]:
    """The lines of `/metrics`."""
    with urllib.request.urlopen(f"{serving.url}/metrics", timeout=PATIENCE) as answer:
        return answer.read().decode().splitlines()
