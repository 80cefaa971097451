"""A server of a tiny decoder, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.models import Decoder
from kvjax.serve import Settings, application, listen
from tests.serve.serving import KEY, POLICY, Serving

TEMPLATE = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}{{ 'be' if add_generation_prompt }}"


@pytest.fixture(scope="session")
def talker(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The tokenizer with a chat template."""
    copied = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    copied.chat_template = TEMPLATE
    return copied


@pytest.fixture(scope="session")
def serving(shallow: Decoder, talker: Any) -> Iterator[Serving]:
    settings = Settings("tiny", api_key=KEY, max_body=20_000, timeout=30, body_timeout=0.5)
    with kvjax.Engine(
        shallow, POLICY, rows=3, max_prompt=32, max_new_tokens=64, tokenizer=talker, max_queue=4
    ) as engine:
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(application(engine, settings), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Serving(engine, listener.getsockname()[1])
        server.should_exit = True
        thread.join()
        listener.close()
