"""Values of fields that are accepted, nearly accepted or nothing of the kind, drawn for fuzzing."""

from __future__ import annotations

import random
from typing import Any

TEXTS = ("", "a", "né 5€ 😀", "\0", "x" * 3000, "<s>", "</s>", "{{ 1 }}", "\u202e", "0", "true")
NUMBERS = (0, 1, 2, -1, 0.5, 1.0, 2**31, 2**63, -(2**63) - 1, 10**400, 1e-320, 1e308, 3.7)
ROLES = ("system", "developer", "user", "assistant", "tool", "bob")
MESSAGE = ("name", "refusal", "tool_calls", "function_call", "audio", "annotations", "cache_control", "images", "id")
UNKNOWN = ("functions", "documents", "guided_json", "", "model ", "\0", "__class__", "ctx", "self", "x" * 3000)
OPTIONS = ("tools", "documents", "enable_thinking", "messages", "tokenize", "bos_token", "raise_exception", "loop")
FLAT = {"type": "function", "name": "f"}


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
        "max_output_tokens": [0, 1, 8, 17],
        "input": [rng.choice(TEXTS), messages(rng), [item(rng) for _ in range(rng.choice([1, 2, 5]))]],
        "text": [{}, {"format": {"type": "json_schema", "name": "a", "schema": value(rng)}}, {"format": value(rng)}],
        "reasoning": [{"effort": rng.choice(TEXTS)}, {"summary": "auto"}],
        "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["x"]],
        "logit_bias": [{}, {"5": 0}, {"5": 1, "65": -100}, {"300": 1}, {rng.choice(TEXTS): 1}],
        "response_format": [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": value(rng)}},
        ],
        "tools": [[], [{"type": "function"}], [tool(rng)], [tool(rng), tool(rng)], [FLAT], [FLAT | {"x": 1}]],
        "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}, FLAT],
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


def item(rng: random.Random) -> Any:
    """An item of a response, or nearly."""
    (message,) = messages(rng)[:1]
    called = {"type": "function_call", "call_id": "c"} | call(rng)["function"]
    output = {"type": "function_call_output", "call_id": "c", "output": rng.choice(TEXTS)}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]}
    drawn: dict[str, Any] = rng.choice([message, message | {"type": "message"}, called, output, thought, {"type": "x"}])
    return drawn | ({rng.choice([*drawn]): value(rng)} if rng.random() < 0.3 else {})


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
