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

from kvjax.engine import Engines
from kvjax.serve import Settings, application, models_of
from kvjax.serve.chat import Chat
from kvjax.serve.responses import Responses
from kvjax.serve.schema import Completion
from kvjax.serve.tokenizing import Detokenize, Tokenize
from tests.serve.drawing import UNKNOWN, likely, value
from tests.tiny import decoder

KEY, MAX_BODY = "secret", 20_000
POLICIES = {"keydiff": "keydiff:budget=16", "h2o": "h2o:budget=12"}
NAMES = ("tiny", "tiny@keydiff", "tiny@h2o")
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
ASKED: list[tuple[Any, str, dict[str, Any]]] = [
    *[(Completion, "/v1/completions", {"prompt": "né", "max_tokens": 3})] * 4,
    *[(Chat, "/v1/chat/completions", {"messages": [{"role": "user", "content": "né"}], "max_tokens": 3})] * 4,
    *[(Responses, "/v1/responses", {"input": "né", "max_output_tokens": 3})] * 2,
    (Tokenize, "/tokenize", {"prompt": "né"}),
    (Detokenize, "/detokenize", {"tokens": [65]}),
]
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
        kind, path, asks = rng.choice(ASKED)
        body: dict[str, Any] = {"model": rng.choice(NAMES)} | asks
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
                "/v1/models/tiny@h2o",
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
    elif sent.path == "/v1/responses" and kind.startswith("text/event-stream"):
        parts = [event.partition("\ndata: ") for event in body.decode().split("\n\n") if event]
        told = [document(data) for _, _, data in parts]
        assert [name for name, _, _ in parts] == [f"event: {event['type']}" for event in told]
        assert [event["sequence_number"] for event in told] == [*range(len(told))]
        assert sent.leaves or told[-1]["type"] in ("response.completed", "response.incomplete", "error")
    elif sent.path == "/v1/responses" and sent.method == "POST":
        assert all(item["status"] in ("completed", "incomplete") for item in document(body)["output"])
    elif kind.startswith("text/event-stream"):
        events = body.decode().removesuffix("\n\n").split("\n\n")
        assert sent.leaves or events.pop() == "data: [DONE]"
        found = [document(event.removeprefix("data: ")) for event in events if event]
        assert all("choices" in event and event["model"] in NAMES[1:] for event in found)
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

    with Engines(
        decoder(vocab=258),
        POLICIES,
        rows=2,
        max_prompt=64,
        max_new_tokens=16,
        tokenizer=tokenizer(),
        max_queue=8,
        prefix_memory="1MB",
        conversation_memory="1MB",
        guided=True,
    ) as engines:
        settings = Settings(api_key=KEY, max_body=MAX_BODY)
        asyncio.run(all_of_them(application(models_of("tiny", POLICIES, engines), settings)))
    return counts, faults


if __name__ == "__main__":
    counted, wrong = fuzzed(1, int(sys.argv[1]))
    sys.stdout.write("".join(f"{status}  {number}\n" for status, number in sorted(counted.items())))
    sys.exit("\n".join(wrong) or 0)
