"""Every request that is not accepted gets OpenAI's form of an error, with the right status."""

import ast
import asyncio
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from kvjax import Greedy
from kvjax.engine import Handle
from kvjax.serve import Settings, application
from kvjax.serve.asking import ask
from kvjax.serve.dialects import Template
from kvjax.serve.schema import Completion
from tests.patience import PATIENCE, wait_for
from tests.serve.serving import GOOD, KEY, Serving, only, send


def test_statuses(serving: Serving) -> None:
    for path, body in (("/v1/completions", GOOD | {"model": "x" * 5000}), (f"/v1/models/{'x' * 5000}", None)):
        status, answer = send(serving, path, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        assert "expected 'tiny'" in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 400
    status, answer = send(serving, "/v1/embeddings")
    assert status == 404
    assert "no path '/v1/embeddings': expected one of /v1/completions, /v1/chat/comp" in answer["error"]["message"]
    status, answer = send(serving, "/v1/completions")
    assert (status, answer["error"]["message"]) == (405, "GET is not accepted here: expected POST")
    assert send(serving, "/v1/completions", GOOD, Content_Type="text/plain")[0] == 415
    assert send(serving, "/v1/completions", GOOD | {"user": "x" * 20_000})[0] == 413
    assert send(serving, "/health", Host="elsewhere.example")[0] == 421
    assert send(serving, "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert send(serving, "/v1/models/tiny")[1]["id"] == "tiny"
    assert send(serving, "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        *(("content-length", value, 413) for value in ("\u00b2", "9" * 5000, "-1", "1e3", "", "20001")),
        ("content-length", "00000000000000000080", 413),
        ("content-type", "Application/JSON ; charset=utf-8", 200),
        ("content-type", "\u00b2", 415),
        ("authorization", f"bearer {KEY}", 200),
        ("authorization", "Bearer \u00b2\u00ff", 401),
        ("authorization", "\u00b2" * 5000, 401),
        *(("host", value, 421) for value in ("\u00b2", "[", "]", ":", "", "::1", "localhost:1:2")),
        *(("host", value, 200) for value in ("[::1]", "[::1]:8000", "127.0.0.1:x")),
    ],
)
def test_headers_that_servers_let_through(serving: Serving, name: str, value: str, status: int) -> None:
    """The application gets bytes in Latin-1, whatever stands in front of it."""
    given = {"host": "localhost", "content-type": "application/json", "authorization": f"Bearer {KEY}"} | {name: value}
    headers = [(key.encode(), text.encode("latin-1")) for key, text in given.items()]
    found, document = call(serving, headers, json.dumps(GOOD).encode())
    assert found == status, document
    assert ("error" in document) == (status != 200)


def call(serving: Serving, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, Any]:
    """The status and the document of the application itself, without a server in front of it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    app = application(only(serving.engine), Settings(api_key=KEY, max_body=20_000))
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_keys(serving: Serving) -> None:
    for given in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"):
        status, answer = send(serving, "/v1/completions", GOOD, Authorization=given)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert ("there is no API key" if not given else "the API key is wrong") in answer["error"]["message"]
    assert send(serving, "/metrics", Authorization="")[0] == 401
    assert send(serving, "/health", Authorization="")[0] == 200
    wrong = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_pages_of_other_origins(serving: Serving) -> None:
    """Only the origins that are named, for preflights, answers and refusals alike."""
    settings = Settings(api_key=KEY, origins=("https://a.example",))
    with TestClient(application(only(serving.engine), settings), base_url="http://localhost") as client:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            preflight = client.options("/v1/completions", headers=asks)
            assert preflight.status_code == (200 if allowed else 400)
            for headers in ({}, {"Authorization": f"Bearer {KEY}"}):
                answer = client.post("/v1/completions", json=GOOD, headers=headers | {"Origin": origin})
                assert answer.status_code == (200 if headers else 401)
                assert answer.headers.get("access-control-allow-origin") == allowed
    for wrong in ("a.example", "https://a.example/", ""):
        with pytest.raises(ValueError, match="the origin"):
            Settings(origins=(wrong,))


@pytest.mark.long
def test_bodies_of_unknown_length_and_slow_ones(serving: Serving) -> None:
    """A body in chunks is cut off at the limit, and one that does not come after the time limit."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", serving.port), timeout=PATIENCE) as client:
        client.sendall(head.encode() + b"5000\r\n" + b" " * 0x5000 + b"\r\n")
        assert b" 413 " in client.recv(1000).partition(b"\r\n")[0]
    with socket.create_connection(("127.0.0.1", serving.port), timeout=PATIENCE) as client:
        client.sendall(head.encode() + b"2\r\n{ \r\n")
        assert b" 408 " in client.recv(1000).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + b"\0" * 100,
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000,  # too much for one read
        *(
            b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + n + b"\r\n\r\n"
            for n in (b"-5", b"\xb2", b"9" * 99)
        ),
    ],
)
def test_what_is_no_http(serving: Serving, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", serving.port), timeout=PATIENCE) as client:
        client.sendall(sent)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert "not HTTP" in json.loads(body)["error"]["message"]


def test_full_queue(serving: Serving) -> None:
    """Three rows and a queue of four: a request of seven answers is always accepted alone, and one of eight never."""
    status, answer = send(serving, "/v1/completions", GOOD | {"prompt": ["ba"] * 4, "n": 2})
    assert status == 400
    assert "8 answers at a time: expected at most 7" in answer["error"]["message"]
    for _ in range(20):  # one after the other, without waiting for rows to be free
        assert send(serving, "/v1/completions", GOOD | {"n": 7})[0] == 200
    endless = {"max_new_tokens": 512, "eos": ()}
    running = serving.engine.submit_all(["ba"] * 5, range(5), **endless)
    before = serving.engine.stats().requests
    status, answer = send(serving, "/v1/completions", GOOD | {"n": 3})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert serving.engine.stats().requests == before
    for handle in running:
        handle.cancel()
    assert send(serving, "/v1/completions", GOOD | {"n": 7})[0] == 200
    idle(serving)


def test_a_client_that_goes_away_frees_its_row(serving: Serving) -> None:
    for stream in (True, False):
        before = serving.engine.stats().finished.get("cancelled", 0)
        body = json.dumps(GOOD | {"max_tokens": 512, "ignore_eos": True, "n": 4, "stream": stream})
        with socket.create_connection(("127.0.0.1", serving.port), timeout=PATIENCE) as client:
            client.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            if stream:
                assert client.recv(10)
            wait_for(lambda: serving.engine.stats().rows_busy > 0, lambda: "no row is busy")
        idle(serving)
        assert serving.engine.stats().finished.get("cancelled", 0) > before


def test_a_request_that_is_cancelled_while_it_is_submitted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that submits cannot be stopped, and the answer must not run on without a reader."""
    submit, entered, goes_on, handles = serving.engine.submit_all, threading.Event(), threading.Event(), []

    def held(*args: Any, **options: Any) -> list[Handle]:
        entered.set()
        assert goes_on.wait(PATIENCE)
        handles.extend(submit(*args, **options))
        return handles

    async def cancelled() -> None:
        request = Completion(**GOOD | {"max_tokens": 512, "ignore_eos": True})
        task = asyncio.create_task(ask(serving.engine, request, Greedy(), Template.of(serving.engine.tokenizer)))
        await asyncio.to_thread(entered.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    monkeypatch.setattr(serving.engine, "submit_all", held)
    asyncio.run(cancelled())
    wait_for(lambda: bool(handles), lambda: "nothing was submitted")
    idle(serving)
    assert [handle.result().finish for handle in handles] == ["cancelled"]


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_goes_away_before_the_first_event(serving: Serving, version: str) -> None:
    """It leaves while the head of the answer waits to be sent. ASGI 2.3 has a message for that, and 2.4 an error."""
    body = json.dumps(GOOD | {"max_tokens": 512, "ignore_eos": True, "stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent = []

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)
        if version == "2.4":
            raise OSError("the client is gone")
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": version},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    before = serving.engine.stats().finished
    app = application(only(serving.engine), Settings())
    asyncio.run(app(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]
    idle(serving)
    after = serving.engine.stats().finished
    assert after == before | {"cancelled": before.get("cancelled", 0) + 1}


def idle(serving: Serving) -> None:
    stats = serving.engine.stats
    wait_for(lambda: not stats().rows_busy and not stats().queue, lambda: f"it never became idle: {stats()}")


def test_metrics_and_stats(serving: Serving) -> None:
    """The numbers are the engine's, in a form that Prometheus' own parser reads."""
    assert send(serving, "/v1/completions", GOOD)[0] == 200
    idle(serving)
    request = urllib.request.Request(f"{serving.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    stats = serving.engine.stats()
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert values["kvjax_rows"] == 3
    assert values["kvjax_tokens_total"] == stats.tokens
    assert values["kvjax_first_token_seconds_count"] == stats.first_token.count
    assert values["kvjax_cache_bytes"] == stats.cache_bytes
    assert values["vllm:generation_tokens_total"] == stats.tokens
    assert values["vllm:e2e_request_latency_seconds_count"] == stats.whole.count == sum(stats.finished.values())
    assert values["kvjax_queue_seconds_count"] == stats.queued.count > 0
    samples = [sample for family in families.values() for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
    success = families["vllm:request_success"].samples
    assert sum(sample.value for sample in success) == sum(stats.finished.values())
    board = (Path(__file__).parents[2] / "docs/guide/grafana.json").read_text()
    assert set(re.findall(r"vllm:\w+|kvjax_\w+", board)) <= {
        sample.name for f in families.values() for sample in f.samples
    }
    assert send(serving, "/stats")[1]["tokens"] == stats.tokens


def test_codes_are_documented() -> None:
    """The guide has every code that a line of the server gives to an error."""
    root = Path(__file__).parents[2]
    calls = [
        node
        for path in (root / "kvjax/serve").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "ApiError"
    ]
    given = [one for call in calls for one in (*call.args[3:], *(key.value for key in call.keywords))]
    codes = {one.value for one in given if isinstance(one, ast.Constant)}
    assert len(codes) > 12
    table = (root / "docs/guide/serving.md").read_text().partition("\n## Errors")[2].partition("\n## ")[0]
    assert codes <= {*re.findall(r"`(\w+)`", table)}


def test_page(serving: Serving) -> None:
    with urllib.request.urlopen(f"{serving.url}/", timeout=PATIENCE) as answer:
        page = answer.read().decode()
    assert '<h1><span id="name">tiny</span>' in page
    assert "//" not in page, "the page loads something"


@pytest.mark.parametrize(
    "wrong", [{"tool_calls": "x"}, {"api_key": ""}, {"api_key": "a b"}, {"max_body": 0}, {"timeout": 0}]
)
def test_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Settings(**wrong)
