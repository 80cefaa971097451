"""Tests `Endpoint` against a small local server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvjax.evaluation.judge import Endpoint, JudgeError

OK = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}


class Server(ThreadingHTTPServer):
    """Gives its replies (status, JSON) in turn and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, object]] = []
        self.asked: list[tuple[str, dict, str | None]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        status, reply = self.server.replies.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def judge(server: Server, **options: object) -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{server.server_port}/v1/", "big", pause=0.001, **options)


def test_it_is_asked_as_a_chat(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_JUDGE_KEY", "secret")
    server.replies = [(200, OK)]
    assert judge(server, temperature=0.0)("Is it?") == "yes"
    ((path, body, key),) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "big",
        "messages": [{"role": "user", "content": "Is it?"}],
        "temperature": 0.0,
        "max_tokens": 1024,
    }
    assert key == "Bearer secret"
    assert "secret" not in repr(judge(server))


def test_what_may_pass_is_tried_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_JUDGE_KEY", raising=False)
    server.replies = [(503, {}), (429, {}), (200, {"choices": []}), (200, OK)]
    assert judge(server)("?") == "yes"
    assert [key for _, _, key in server.asked] == [None] * 4


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([(401, {"error": "no key"})], r'gave no reply: HTTP 401: \{"error": "no key"\}'),
        ([(500, {})] * 2, r"HTTP 500: \{\}"),
        (
            [(200, {"choices": [{"message": {"content": None}}]})] * 2,
            "its reply has the content None: expected a string",
        ),
        ([(200, [])] * 2, "TypeError"),
    ],
)
def test_what_does_not_pass_is_an_error(server: Server, replies: list[tuple[int, object]], error: str) -> None:
    server.replies = list(replies)
    with pytest.raises(JudgeError, match=error):
        judge(server, tries=2)("?")
    assert not server.replies


def test_nobody_there() -> None:
    with pytest.raises(
        JudgeError, match=r"the judge big at http://127\.0\.0\.1:9/v1/chat/completions gave no reply: URLErr"
    ):
        Endpoint("http://127.0.0.1:9/v1", "big", tries=1)("?")
