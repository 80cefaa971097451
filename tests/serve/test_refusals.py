"""Every request that is not accepted gets OpenAI's form of an error, with the right status."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvjax import Greedy
from kvjax.engine import Handle
from kvjax.serve import Settings, application
from kvjax.serve.asking import ask
from kvjax.serve.messages import Message, Part
from kvjax.serve.schema import Chat, Completion, Form, StreamOptions
from tests.serve.serving import KEY, POLICY, Serving

GOOD = {"model": "tiny", "prompt": "ba", "max_tokens": 2}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "ba"}], "max_tokens": 2}
GOOD_CHAT = {"model": "tiny", "max_tokens": 2}


def send(serving: Serving, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the document of an answer; a body is sent as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    default = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    named = default | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(serving.url + path, data, named)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        (b"{", None, "invalid_json", "not JSON"),
        (b"\xff\xfe", None, "invalid_json", "not JSON"),
        (b"[" * 10_000, None, "invalid_json", "not JSON: recursion limit"),
        (b'{"seed": ' + b"1" * 5000 + b"}", None, "invalid_json", "not JSON: number out of range"),
        (b'{"model": "tiny", "prompt": "ba", "top_p": NaN}', None, "invalid_json", "not JSON"),
        ([], None, None, "no JSON object"),
        ({"prompt": "ba"}, "model", "missing_required_parameter", "model is missing"),
        ({"model": "tiny"}, "prompt", "missing_required_parameter", "prompt is missing"),
        ({"model": "tiny", "promt": "ba"}, "promt", "unknown_parameter", "promt: unknown or not supported"),
        (GOOD | {"nonsense": None}, "nonsense", "unknown_parameter", "nonsense: unknown"),
        (
            GOOD | {"x" * 5000: 1},
            "x" * 200 + "... (5,000 characters)",
            "unknown_parameter",
            "... (5,000 characters): unk",
        ),
        (GOOD | {"prompt": ""}, "prompt", "invalid_value", 'prompt="": expected a string, token ids, or a list of'),
        (GOOD | {"prompt": []}, "prompt", "invalid_value", "prompt=[]: expected a string, token ids"),
        (GOOD | {"prompt": [[]]}, "prompt", "invalid_value", "prompt.0=[]: expected prompt to be a string"),
        (GOOD | {"prompt": ["ba", ""]}, "prompt", "invalid_value", 'prompt.1="": expected prompt to be'),
        (GOOD | {"prompt": [1, 2, "ba"]}, "prompt", "invalid_type", 'prompt.2="ba": expected prompt to be'),
        (GOOD | {"prompt": [[1, 2], [3, None]]}, "prompt", "invalid_type", "prompt.1.1=null: expected prompt to be"),
        (GOOD | {"prompt": [1] * 5000 + [0.5]}, "prompt", "invalid_type", "prompt.5000=0.5: expected"),
        (GOOD | {"prompt": {"a": "x" * 5000}}, "prompt", "invalid_type", "... (5,009 characters): expected a string"),
        (GOOD | {"prompt": [101]}, "prompt", "invalid_value", "0 .. 100"),
        (GOOD | {"prompt": "ba " * 40}, "prompt", "context_length_exceeded", "maximum context length"),
        (GOOD | {"prompt": "Emma"}, "prompt", "invalid_value", "cannot encode the prompt 'Emma': "),
        (GOOD | {"prefix": []}, "prefix", "invalid_value", "prefix=[]: expected a string or token ids"),
        (GOOD | {"max_tokens": 513}, "max_tokens", "invalid_value", "max_tokens=513: expected at most 512"),
        (GOOD | {"max_tokens": 0}, "max_tokens", "invalid_value", "max_tokens=0: expected an integer of at least 1"),
        (GOOD | {"max_tokens": "2"}, "max_tokens", "invalid_type", 'max_tokens="2": expected an integer'),
        (GOOD | {"max_tokens": 2.5}, "max_tokens", "invalid_type", "max_tokens=2.5: expected an integer"),
        (GOOD | {"max_tokens": True}, "max_tokens", "invalid_type", "max_tokens=true: expected an integer"),
        (GOOD | {"temperature": -1}, "temperature", "invalid_value", "temperature=-1: expected a number from 0 to 100"),
        (GOOD | {"temperature": "hot"}, "temperature", "invalid_type", 'temperature="hot": expected a number'),
        (b'{"model": "tiny", "prompt": "ba", "temperature": 1e999}', "temperature", "invalid_value", "=Infinity: exp"),
        (GOOD | {"top_p": 1.5}, "top_p", "invalid_value", "top_p=1.5: expected a number above 0 and at most 1"),
        (GOOD | {"top_p": 0}, "top_p", "invalid_value", "top_p=0: expected a number above 0"),
        (GOOD | {"stop": "x" * 1001}, "stop", "invalid_value", "at most 1,000 characters"),
        (GOOD | {"stop": ["a"] * 17}, "stop", "invalid_value", "a list of at most 16"),
        (GOOD | {"stop": ["a", 5]}, "stop", "invalid_type", "stop.1=5: expected stop to be a string, or a list"),
        (GOOD | {"n": 17}, "n", "invalid_value", "n=17: expected an integer from 1 to 16"),
        (GOOD | {"seed": 2**63}, "seed", "invalid_value", "seed=9223372036854775808: expected an integer of 64 bits"),
        (GOOD | {"logprobs": 3}, "logprobs", "invalid_value", "logprobs=3: expected null or 0"),
        (
            GOOD | {"echo": True},
            "echo",
            "invalid_value",
            "echo=true: expected null or false: this server does not score",
        ),
        (GOOD | {"echo": True, "logprobs": 1, "max_tokens": 0}, "echo", "invalid_value", "does not score prompts"),
        (GOOD | {"frequency_penalty": 0.5}, "frequency_penalty", "invalid_value", "=0.5: expected null or 0"),
        (
            GOOD | {"logit_bias": {"5": 1}},
            "logit_bias",
            "invalid_value",
            'logit_bias={"5": 1}: expected null, or an obj',
        ),
        (GOOD | {"skip_special_tokens": False}, "skip_special_tokens", "invalid_value", "expected null or true"),
        (GOOD | {"stream_options": {"fast": 1}}, "stream_options", "unknown_parameter", "stream_options.fast: unknown"),
        (
            GOOD | {"stream_options": {"include_usage": 1}},
            "stream_options",
            "invalid_type",
            "include_usage=1: expected",
        ),
        (GOOD | {"stream_options": [1]}, "stream_options", "invalid_type", "stream_options=[1]: expected an object"),
    ],
)
def test_bad_completions(serving: Serving, body: Any, param: str | None, code: str | None, said: str) -> None:
    status, answer = send(serving, "/v1/completions", body)
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert said in error["message"]
    assert len(error["message"]) < 1500


def user(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "ba"}, {"role": "user", "content": "ba"} | message]}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"messages": []}, "messages", "messages=[]: expected a list of 1 to 4,096 objects"),
        ({"messages": "ba"}, "messages", 'messages="ba": expected a list of'),
        ({"messages": [5]}, "messages", "messages.0=5: expected messages to be a list of"),
        ({"messages": [{"content": "ba"}]}, "messages", "messages.0.role is missing"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content is missing"),
        (user(role="tool"), "messages", 'messages.1.role="tool": expected "system", "developer", "user" or'),
        (user(role=None), "messages", "messages.1.role=null: expected"),
        (user(content=None), "messages", "messages.1.content=null: expected a string, or a list of"),
        (user(content=5), "messages", "messages.1.content=5: expected a string, or a list of"),
        (user(content=["ba"]), "messages", 'messages.1.content.0="ba": expected messages.1.content to be a str'),
        (user(content=[{"type": "text"}]), "messages", "messages.1.content.0.text is missing"),
        (user(content=[{"type": "text", "text": 5}]), "messages", "messages.1.content.0.text=5: expected a string"),
        (
            user(content=[{"type": "image_url", "image_url": {"url": "x"}, "text": ""}]),
            "messages",
            'messages.1.content.0.type="image_url": expected "text"',
        ),
        (user(content=[{"type": "text", "text": "", "image": "x"}]), "messages", "messages.1.content.0.image: unknown"),
        (user(role="assistant", tool_calls=[{"id": "c"}]), "messages", "messages.1.tool_calls: unknown or not supp"),
        (user(images=["x"]), "messages", "messages.1.images: unknown or not supported; expected one of role, content"),
        ({"prefix": [{"role": "bob", "content": ""}]}, "prefix", 'prefix.0.role="bob": expected "system"'),
        ({"tools": [{"type": "function"}]}, "tools", 'tools=[{"type": "function"}]: expected null'),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools", "expected null, an empty list, or"),
        ({"tool_choice": "required"}, "tool_choice", 'tool_choice="required": expected "none", or "auto"'),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs=[1]: expected an object"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs", "at most 64 options"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "has 'tokenize'"),
        ({"response_format": {"type": "json_object"}}, "response_format", 'response_format.type="json_object": exp'),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2: expected null or 0"),
        ({"max_completion_tokens": 513}, "max_completion_tokens", "max_completion_tokens=513: expected at most 512"),
        (user(content="ba " * 40), "messages", "maximum context length"),
    ],
)
def test_bad_chats(serving: Serving, change: Any, param: str, said: str) -> None:
    """The error names the field that was sent, where it is."""
    status, answer = send(serving, "/v1/chat/completions", CHAT | change)
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


def test_every_field_says_what_it_accepts() -> None:
    for kind in (Completion, Chat, Message, Part, StreamOptions, Form):
        assert not [name for name, field in kind.model_fields.items() if not field.description]


def test_messages_of_answers_and_of_other_clients(serving: Serving) -> None:
    """An answer, as the server and its clients write it, is accepted as a message; so are fields that say nothing."""
    answer = serving.client.chat.completions.create(**CHAT).choices[0].message
    wire = send(serving, "/v1/chat/completions", CHAT)[1]["choices"][0]["message"] | {"content": "ba"}
    answer.content = "ba"  # the tiny tokenizer cannot read what it writes
    usual = send(serving, "/v1/chat/completions", user(role="assistant") | GOOD_CHAT)[1]
    for again in (wire, answer.model_dump(), answer.model_dump() | {"annotations": [], "name": "bob", "id": "x"}):
        status, found = send(serving, "/v1/chat/completions", GOOD_CHAT | user(**again))
        assert status == 200, found
        assert found["usage"] == usual["usage"]
    serving.client.chat.completions.create(**CHAT | {"messages": [*CHAT["messages"], answer]})
    marked = [{"type": "text", "text": "ba", "cache_control": {"type": "ephemeral"}}]
    for message in ({"name": "bob"}, {"content": marked}, {"cache_control": {"type": "ephemeral"}}):
        assert send(serving, "/v1/chat/completions", GOOD_CHAT | user(**message))[0] == 200
    assert send(serving, "/v1/chat/completions", GOOD_CHAT | user(role="assistant", content=None))[0] == 200


def test_what_changes_nothing_is_accepted(serving: Serving) -> None:
    neutral = {
        **{"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0, "presence_penalty": 0.0, "cache_prompt": True},
        **{"logit_bias": {"5": 0}, "skip_special_tokens": True, "stop": ["", ""], "max_tokens": 2.0, "seed": 1},
    }
    given = GOOD | neutral | {"best_of": 1, "echo": False, "suffix": ""}
    usual = send(serving, "/v1/completions", GOOD | {"seed": 1})[1]["choices"]
    for top_k in ({}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1}):
        status, answer = send(serving, "/v1/completions", given | top_k)
        assert (status, answer["choices"]) == (200, usual)
    more = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False}
    assert send(serving, "/v1/chat/completions", CHAT | neutral | more)[0] == 200
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert send(serving, "/v1/chat/completions", CHAT | tools)[0] == 200
    assert send(serving, "/v1/chat/completions", CHAT | {"tool_choice": "auto"})[0] == 200


def test_options_of_the_chat_template(serving: Serving) -> None:
    usual = send(serving, "/v1/chat/completions", CHAT)[1]["usage"]["prompt_tokens"]
    for options in ({"chat_template_kwargs": {"twice": True}}, {"reasoning_effort": "low"}):
        assert send(serving, "/v1/chat/completions", CHAT | options)[1]["usage"]["prompt_tokens"] == usual + 1


def test_statuses(serving: Serving) -> None:
    for path, body in (("/v1/completions", GOOD | {"model": "x" * 5000}), (f"/v1/models/{'x' * 5000}", None)):
        status, answer = send(serving, path, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        assert "expected 'tiny'" in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 400
    status, answer = send(serving, "/v1/responses")
    assert status == 404
    assert "no path '/v1/responses': expected one of /v1/completions, /v1/chat/comp" in answer["error"]["message"]
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
    app = application(serving.engine, Settings("tiny", POLICY, api_key=KEY, max_body=20_000))
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


def test_bodies_of_unknown_length_and_slow_ones(serving: Serving) -> None:
    """A body in chunks is cut off at the limit, and one that does not come after the time limit."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as client:
        client.sendall(head.encode() + b"5000\r\n" + b" " * 0x5000 + b"\r\n")
        assert b" 413 " in client.recv(1000).partition(b"\r\n")[0]
    with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as client:
        client.sendall(head.encode() + b"2\r\n{ \r\n")
        assert b" 408 " in client.recv(1000).partition(b"\r\n")[0]


def test_full_queue(serving: Serving) -> None:
    """Three rows and a queue of four: a request of 64 answers does not fit, and leaves no row busy."""
    many = GOOD | {"prompt": ["ba"] * 4, "n": 16, "max_tokens": 512, "ignore_eos": True}
    status, answer = send(serving, "/v1/completions", many)
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    idle(serving)


def test_a_client_that_goes_away_frees_its_row(serving: Serving) -> None:
    for stream in (True, False):
        before = serving.engine.stats().finished.get("cancelled", 0)
        body = json.dumps(GOOD | {"max_tokens": 512, "ignore_eos": True, "n": 4, "stream": stream})
        with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as client:
            client.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            if stream:
                assert client.recv(10)
            wait_for(lambda: serving.engine.stats().rows_busy > 0)
        idle(serving)
        assert serving.engine.stats().finished.get("cancelled", 0) > before


def test_a_request_that_is_cancelled_while_it_is_submitted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that submits cannot be stopped, and the answer must not run on without a reader."""
    submit, entered, goes_on, handles = serving.engine.submit, threading.Event(), threading.Event(), []

    def held(*args: Any, **options: Any) -> Handle:
        entered.set()
        assert goes_on.wait(10)
        handles.append(submit(*args, **options))
        return handles[-1]

    async def cancelled() -> None:
        request = Completion(**GOOD | {"max_tokens": 512, "ignore_eos": True})
        task = asyncio.create_task(ask(serving.engine, request, Greedy()))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    monkeypatch.setattr(serving.engine, "submit", held)
    asyncio.run(cancelled())
    wait_for(lambda: bool(handles))
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
    app = application(serving.engine, Settings("tiny", POLICY))
    asyncio.run(app(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]
    idle(serving)
    after = serving.engine.stats().finished
    assert after == before | {"cancelled": before.get("cancelled", 0) + 1}


def idle(serving: Serving) -> None:
    wait_for(lambda: not serving.engine.stats().rows_busy and not serving.engine.stats().queue)


def wait_for(state: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not state():
        assert time.monotonic() < until, "20 seconds were not enough"
        time.sleep(0.001)


def test_metrics_and_stats(serving: Serving) -> None:
    """The numbers are the engine's, in a form that Prometheus' own parser reads."""
    assert send(serving, "/v1/completions", GOOD)[0] == 200
    idle(serving)
    request = urllib.request.Request(f"{serving.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    stats = serving.engine.stats()
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert values["kvjax_rows"] == 3
    assert values["kvjax_tokens_total"] == stats.tokens
    assert values["kvjax_first_token_seconds_count"] == stats.first_token.count
    assert values["kvjax_cache_bytes"] == stats.cache_bytes
    assert send(serving, "/stats")[1]["tokens"] == stats.tokens


def test_page(serving: Serving) -> None:
    with urllib.request.urlopen(f"{serving.url}/", timeout=30) as answer:
        page = answer.read().decode()
    assert "<h1>tiny <code" in page
    assert "//" not in page, "the page loads something"


@pytest.mark.parametrize("wrong", [{"model": ""}, {"api_key": ""}, {"api_key": "a b"}, {"max_body": 0}, {"timeout": 0}])
def test_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Settings(**({"model": "tiny", "policy": "full"} | wrong))
