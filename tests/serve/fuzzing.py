"""Requests that are valid, nearly valid or hostile, drawn from a seed, and what every answer must be.

    python -m tests.serve.fuzzing 5000

sends them to the application in this process, and prints how many had each status.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.serve import Settings, application
from kvjax.serve.chat import Chat
from kvjax.serve.schema import Completion
from kvjax.serve.tokenizing import Detokenize, Tokenize
from tests.tiny import decoder

KEY, MAX_BODY = "secret", 20_000
POLICY = "keydiff:budget=16"
TEXTS = ("", "a", "né 5€ 😀", "\0", "x" * 3000, "<s>", "</s>", "{{ 1 }}", "\u202e", "0", "true")
NUMBERS = (0, 1, 2, -1, 0.5, 1.0, 2**31, 2**63, -(2**63) - 1, 10**400, 1e-320, 1e308, 3.7)
LITERALS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b'"\\ud800"',
    b"1" * 5000,
    b"[" * 500,
    b"tru",
    b"\xff",
    b"01",
    b"/**/1",
    b"",
)
ROLES = ("system", "developer", "user", "assistant", "tool", "bob")
MESSAGE = ("name", "refusal", "tool_calls", "function_call", "audio", "annotations", "cache_control", "images", "id")
UNKNOWN = ("functions", "documents", "guided_json", "", "model ", "\0", "__class__", "ctx", "self", "x" * 3000)
OPTIONS = ("tools", "documents", "enable_thinking", "messages", "tokenize", "bos_token", "raise_exception", "loop")
OTHERS: list[tuple[Any, str]] = [(Tokenize, "/tokenize"), (Detokenize, "/detokenize")]
WORDS = ("Input should", "constrained", "list[", "function-", "pydantic", "Traceback", "kvjax/")


@dataclass
class Sent:
    """A request as a server hands it to an application. `leaves`: the client goes away after the body."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    pieces: int = 1
    leaves: bool = False


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value of JSON."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice([None, True, False])
    size = rng.choice([0, 1, 2, 20])
    if kind < 7:
        return [value(rng, depth + 1) for _ in range(size)]
    return {rng.choice(TEXTS + UNKNOWN): value(rng, depth + 1) for _ in range(size)}


def likely(rng: random.Random, name: str) -> Any:
    """A value of a field that is accepted, or nearly."""
    drawn: dict[str, Any] = {
        "prompt": [
            rng.choice(TEXTS),
            [1, 2, rng.randrange(300)],
            ["a", rng.choice(TEXTS)],
            [[1], [rng.randrange(300)]],
        ],
        "messages": [messages(rng)],
        "prefix": [messages(rng), rng.choice(TEXTS), [1, 2, 3]],
        "tokens": [[1, 2, 300], [65], []],
        "n": [1, 2, 3, 16],
        "stop": [rng.choice(TEXTS), [rng.choice(TEXTS) for _ in range(rng.choice([1, 3, 16, 17]))]],
        "stream": [True, False],
        "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {"x": value(rng)}],
        "temperature": [0, 0.7, 100, 101],
        "top_p": [0, 0.1, 1],
        "top_k": [-2, -1, 0, 1, 5, 10**6],
        "min_p": [0, 0.5, 1],
        "repetition_penalty": [1, 1.3, 1e-300, 1e300],
        "seed": [0, -1, 2**63 - 1],
        "logprobs": [0, 1, 20, True, False],
        "top_logprobs": [0, 1, 20],
        "frequency_penalty": [0, -2, 2, 2.1],
        "presence_penalty": [0, -2, 2],
        "regex": ["[ab]+", "(a", ".*", "a{2000}{2000}", rng.choice(TEXTS)],
        "stop_token_ids": [[], [0, 65], [2**31]],
        "max_tokens": [0, 1, 8, 17],
        "max_completion_tokens": [1, 8, 17],
        "logit_bias": [{}, {"5": 0}, {"5": 1, "65": -100}, {"300": 1}, {rng.choice(TEXTS): 1}],
        "response_format": [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": value(rng)}},
        ],
        "tools": [[], [{"type": "function"}], [tool(rng)], [tool(rng), tool(rng)]],
        "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
        "skip_special_tokens": [True, False],
        "chat_template_kwargs": [{rng.choice(OPTIONS): value(rng)}, {}],
        "modalities": [["text"], ["text", "audio"]],
    }
    return rng.choice([*drawn.get(name, [value(rng)]), None])


def tool(rng: random.Random) -> Any:
    function: dict[str, Any] = {"name": rng.choice("fg")}
    if rng.random() < 0.5:
        function["parameters"] = value(rng) if rng.random() < 0.3 else {"type": "object", "properties": {"a": {}}}
    return {"type": "function", "function": function}


def call(rng: random.Random) -> Any:
    arguments = rng.choice(["{}", '{"a": 1}', "[]", "{", rng.choice(TEXTS)])
    return {"id": rng.choice(TEXTS), "type": "function", "function": {"name": "f", "arguments": arguments}}


def messages(rng: random.Random) -> list[Any]:
    def one() -> Any:
        part = {"type": rng.choice(["text", "text", "image_url"]), "text": rng.choice(TEXTS)}
        content = rng.choice([rng.choice(TEXTS), [part, {"type": "text", "text": "a"}], None, "a"])
        message: dict[str, Any] = {"role": rng.choice(ROLES[:5] if rng.random() < 0.8 else ROLES), "content": content}
        if message["role"] == "tool" and rng.random() < 0.8:
            message["tool_call_id"] = rng.choice(TEXTS)
        if message["role"] == "assistant" and rng.random() < 0.3:
            message["tool_calls"] = [call(rng)]
        return message | ({rng.choice(MESSAGE): value(rng)} if rng.random() < 0.3 else {})

    return [one() for _ in range(rng.choice([1, 1, 2, 5]))]


def spoilt(rng: random.Random, body: bytes) -> bytes:
    """Bytes that may be no JSON."""
    at = rng.randrange(len(body) + 1)
    cut = rng.randrange(at, min(at + 10, len(body)) + 1)
    return rng.choice([body[:at], body[:at] + rng.choice(LITERALS) + body[cut:], rng.randbytes(50), body + body])


def headers(rng: random.Random) -> dict[str, str]:
    """Headers that a server may let through."""
    drawn = {
        "host": ["localhost:8000", "[::1]", "", "[", "a.example", "\xff"],
        "content-type": ["application/json; charset=utf-16", "", "text/plain", "\xb2", "APPLICATION/JSON"],
        "authorization": ["", "Bearer", "Bearer \xff", f"bearer {KEY}", f"Bearer {KEY} "],
        "content-length": ["\xb2", "9" * 5000, "-1", "", "0", "1e3", "00000000000000000000001"],
        "accept": ["text/html", "\xff" * 100],
        "origin": ["null", "http://a.example"],
        "transfer-encoding": ["chunked", "gzip"],
    }
    name = rng.choice(list(drawn))
    return {name: rng.choice(drawn[name])}


def requests(seed: int, number: int) -> Iterator[Sent]:
    """Requests of all kinds, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(number):
        kind, path = rng.choice([(Completion, "/v1/completions"), (Chat, "/v1/chat/completions")] * 4 + OTHERS)
        asks = {"prompt": "né"} if kind in (Completion, Tokenize) else {"messages": [{"role": "user", "content": "né"}]}
        body: dict[str, Any] = {"model": "tiny"} | ({"tokens": [65]} if kind is Detokenize else asks)
        if path.startswith("/v1"):
            body["max_tokens"] = 3
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            name = rng.choice([*kind.model_fields])
            body[name] = likely(rng, name) if rng.random() < 0.8 else value(rng)
        if rng.random() < 0.1:
            body[rng.choice(UNKNOWN)] = value(rng)
        if rng.random() < 0.05:
            del body[rng.choice([*body])]
        written = json.dumps(body if rng.random() < 0.98 else value(rng)).encode()
        sent = Sent(path, written if rng.random() < 0.9 else spoilt(rng, written))
        if rng.random() < 0.1:
            sent.headers = headers(rng)
        if rng.random() < 0.05:
            sent.method = rng.choice(["GET", "PUT", "OPTIONS", "HEAD", "DELETE", "x" * 3000])
        if rng.random() < 0.05:
            tried = [
                "/",
                "/health",
                "/metrics",
                "/stats",
                "/v1/models",
                "/v1/models/",
                "/v1/models/tiny",
                "/v1/models/\0",
            ]
            sent.path = rng.choice([*tried, "/v1/completions/", "//", "/" + "é" * 3000, "/v1/responses", ""])
        sent.pieces, sent.leaves = rng.choice([1, 1, 1, 3, 50]), rng.random() < 0.03
        yield sent


async def answered(app: ASGIApp, sent: Sent) -> tuple[int, bytes, str]:
    """The status, the body and the content type of an answer. Raises what the application raises."""
    size = max(1, -(-len(sent.body) // sent.pieces))
    chunks = [sent.body[i : i + size] for i in range(0, len(sent.body), size)] or [b""]
    waiting, answers = iter(chunks), []
    left = len(chunks)

    async def receive() -> Any:
        nonlocal left
        if left:
            left -= 1
            return {"type": "http.request", "body": next(waiting), "more_body": left > 0}
        if not sent.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(message)

    usual = {"host": "localhost", "content-type": "application/json", "authorization": f"Bearer {KEY}"}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": sent.method,
        "path": sent.path,
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), text.encode("latin-1")) for name, text in (usual | sent.headers).items()],
    }
    await app(scope, receive, send)
    head, *rest = answers
    kind = dict(head["headers"]).get(b"content-type", b"").decode()
    return head["status"], b"".join(message.get("body", b"") for message in rest), kind


def document(text: str | bytes) -> Any:
    """JSON without the numbers that JSON does not have."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check(sent: Sent, status: int, body: bytes, kind: str) -> None:
    """Raises AssertionError for an answer that the protocol does not have."""
    assert status <= 499
    if status >= 400:
        if not (sent.leaves and status == 499):
            check_error(document(body))
    elif kind.startswith("text/event-stream"):
        events = body.decode().removesuffix("\n\n").split("\n\n")
        assert sent.leaves or events.pop() == "data: [DONE]"
        found = [document(event.removeprefix("data: ")) for event in events if event]
        assert all("choices" in event and event["model"] == "tiny" for event in found)
        check_spelling([choice for event in found for choice in event["choices"]])
    elif kind.startswith("application/json") and sent.method == "POST" and sent.path.startswith("/v1"):
        check_spelling(document(body)["choices"])


def check_error(found: Any) -> None:
    error = found["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 1500
    assert not [word for word in WORDS if word in error["message"]]
    assert isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))


def check_spelling(choices: list[Any]) -> None:
    """The tokens of each answer spell it, if they are there."""
    texts: dict[int, str] = {}
    spelled: dict[int, bytes] = {}
    for choice in choices:
        index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
        said = message.get("content") or message.get("reasoning_content") or ""
        texts[index] = texts.get(index, "") + (choice.get("text") or said)
        for token in (choice["logprobs"] or {}).get("content") or ():
            spelled[index] = spelled.get(index, b"") + bytes(token["bytes"])
    for index, data in spelled.items():
        assert data == texts[index].encode()


def tokenizer() -> Any:
    """A vocabulary of bytes, so that every text can be read and most answers have bytes that form no character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    options = "{{ tools }}{{ enable_thinking + 'a' if enable_thinking }}{# tool_calls <tool_call> <think> </think> #}"
    found.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}" + options
    return found


def fuzzed(seed: int, number: int) -> tuple[Counter[int], list[str]]:
    """The number of answers by status, and what was wrong."""
    counts: Counter[int] = Counter()
    faults = []

    async def all_of_them(app: ASGIApp) -> None:
        for i, sent in enumerate(requests(seed, number)):
            status, body, kind = 0, b"", ""
            try:
                status, body, kind = await answered(app, sent)
                check(sent, status, body, kind)
            except Exception as error:
                faults.append(f"request {i}: {error!r}: {status} {body[:300]!r} for {str(sent)[:600]}")
            counts[status] += 1

    with kvjax.Engine(
        decoder(vocab=258),
        POLICY,
        rows=2,
        max_prompt=64,
        max_new_tokens=16,
        tokenizer=tokenizer(),
        max_queue=8,
        prefix_memory="1MB",
        guided=True,
    ) as engine:
        asyncio.run(all_of_them(application(engine, Settings("tiny", POLICY, api_key=KEY, max_body=MAX_BODY))))
    return counts, faults


if __name__ == "__main__":
    counted, wrong = fuzzed(1, int(sys.argv[1]))
    sys.stdout.write("".join(f"{status}  {number}\n" for status, number in sorted(counted.items())))
    sys.exit("\n".join(wrong) or 0)
