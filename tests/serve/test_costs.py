"""What a request costs does not grow with what a client puts into it, beyond reading it once."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from pydantic import ValidationError

from kvjax import Greedy
from kvjax.serve import Settings, application
from kvjax.serve.asking import Asked, ask
from kvjax.serve.chat import Chat
from kvjax.serve.dialects import Template
from kvjax.serve.errors import ApiError
from kvjax.serve.parsing import parse
from kvjax.serve.schema import Completion
from tests.patience import PATIENCE
from tests.serve.serving import Serving, only

MANY = 50_000
KEYS = {str(i): 1 for i in range(MANY)}
TEXT: Any = {"model": "tiny", "prompt": "ba"}
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "ba"}]}
WRONG: list[Any] = [[0.5] * MANY, [[0.5]] * MANY, [None] * MANY, KEYS]
TOLD: list[Any] = [[5] * MANY, [{}] * MANY, [CHAT["messages"][0] | KEYS], KEYS]
BAD: list[tuple[Any, dict[str, Any]]] = [
    *((Completion, TEXT | {"prompt": wrong}) for wrong in WRONG),
    (Completion, TEXT | {"prompt": ["ba"] * 2049}),
    (Completion, TEXT | {"prefix": [0.5] * MANY}),
    (Completion, TEXT | {"stop": [5] * MANY}),
    (Completion, TEXT | {"logit_bias": KEYS}),
    (Completion, TEXT | {"stream_options": KEYS}),
    (Completion, TEXT | {"metadata": [1] * MANY}),
    (Completion, TEXT | KEYS),
    *((Chat, CHAT | {"messages": told}) for told in TOLD),
    (Chat, CHAT | {"messages": CHAT["messages"] * 4097}),
    (Chat, CHAT | {"messages": [{"role": "user", "content": [5] * MANY}]}),
    (Chat, CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}),
    (Chat, CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": ""} | KEYS]}]}),
    (Chat, CHAT | {"prefix": [5] * MANY}),
    (Chat, CHAT | {"tools": [{}] * MANY, "tool_choice": "none"}),
    (Chat, CHAT | {"modalities": [5] * MANY}),
    (Chat, CHAT | {"response_format": KEYS}),
    (Chat, CHAT | {"chat_template_kwargs": KEYS}),
]


@pytest.mark.parametrize(("kind", "document"), BAD)
def test_the_number_of_errors(kind: Any, document: Any) -> None:
    """One error for each type that a field may have, however often the value is wrong; the answer is one line."""
    with pytest.raises(ApiError, match=r"expected|missing") as told:
        parse(kind, json.dumps(document).encode())
    assert len(told.value.message) < 1500
    if not document.keys() & KEYS.keys():
        with pytest.raises(ValidationError) as found:
            kind.model_validate(document)
        assert found.value.error_count() <= 5


@pytest.mark.long
def test_what_nobody_reads_is_not_held() -> None:
    nothing = dict.fromkeys(KEYS)
    part = {"type": "text", "text": "ba", "cache_control": KEYS} | nothing
    message = {"role": "user", "content": [part], "id": KEYS, "annotations": [KEYS]} | nothing
    given = CHAT | {"messages": [message], "metadata": KEYS, "logit_bias": {}}
    read = parse(Chat, json.dumps(given).encode())
    gc.collect()
    assert len(repr(read)) < 1500


def test_a_request_is_not_held_while_it_is_answered(serving: Serving) -> None:
    async def asked() -> tuple[Asked, Any]:
        request = parse(Completion, json.dumps(TEXT).encode())
        template = Template.of(serving.engine.tokenizer)
        return await ask(serving.engine, request, Greedy(), template), weakref.ref(request)

    found, request = asyncio.run(asked())
    gc.collect()
    assert request() is None
    for handle in found.handles:
        handle.result(PATIENCE)


def test_a_body_that_drips(serving: Serving) -> None:
    """The limit is of the whole body: a client cannot begin it anew with each byte."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    app = application(only(serving.engine), Settings(max_body=200, body_timeout=0.1))
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408
