"""`/tokenize` and `/detokenize` turn what a request has into tokens, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.serving import CHAT, Serving, send


def test_there_and_back(serving: Serving) -> None:
    found = send(serving, "/tokenize", {"model": "tiny", "prompt": "ba ce", "return_token_strs": True})[1]
    assert found == {"count": 3, "max_model_len": 16, "tokens": [99, 5, 11], "token_strs": ["<s>", "ba", "ce"]}
    assert send(serving, "/tokenize", {"prompt": "ba ce", "add_special_tokens": False})[1]["tokens"] == [5, 11]
    assert send(serving, "/detokenize", {"tokens": [99, 5, 11]})[1] == {"prompt": "<s>bace"}
    used = send(serving, "/v1/chat/completions", CHAT)[1]["usage"]["prompt_tokens"]
    messages: dict[str, Any] = {"messages": CHAT["messages"]}
    assert send(serving, "/tokenize", messages)[1]["count"] == used
    assert send(serving, "/tokenize", messages | {"add_generation_prompt": False})[1]["count"] == used - 1
    assert send(serving, "/tokenize", messages | {"chat_template_kwargs": {"twice": True}})[1]["count"] == used + 1


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "prompt is missing"),
        ("/tokenize", {"prompt": "ba", "messages": CHAT["messages"]}, "prompt", 'prompt="ba": expected a string, or'),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt=5: expected"),
        ("/tokenize", {"prompt": "ba", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "beside messages"),
        ("/tokenize", {"prompt": "Emma"}, "prompt", "cannot encode the text 'Emma'"),
        ("/tokenize", {"text": "ba"}, "text", "text: unknown or not supported; expected one of model, prompt"),
        ("/detokenize", {"tokens": []}, "tokens", "tokens=[]: expected a list of token ids"),
        ("/detokenize", {"tokens": [101]}, "tokens", "tokens has 101: expected ids in 0 .. 100"),
    ],
)
def test_refusals(serving: Serving, path: str, body: Any, param: str, said: str) -> None:
    status, answer = send(serving, path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


def test_another_model(serving: Serving) -> None:
    assert send(serving, "/tokenize", {"model": "other", "prompt": "ba"})[0] == 404
