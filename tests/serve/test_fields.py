"""What each field of a request accepts, and the error that names the field otherwise."""

from typing import Any

import pytest

from kvjax.serve import items
from kvjax.serve.chat import Chat
from kvjax.serve.formats import ResponseFormat
from kvjax.serve.functions import Called, Choice, Function, Tool, ToolCall
from kvjax.serve.items import FunctionCall, FunctionOutput, Said, Thought
from kvjax.serve.messages import Message, Part
from kvjax.serve.responses import Responses
from kvjax.serve.schema import Completion, StreamOptions
from tests.serve.serving import CHAT, GOOD, Serving, send

JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
GOOD_CHAT = {"model": "tiny", "max_tokens": 2}


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
        (GOOD | {"prompt": "Emma"}, "prompt", "invalid_value", "cannot encode the text 'Emma': "),
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
        (
            GOOD | {"logprobs": 21},
            "logprobs",
            "invalid_value",
            "logprobs=21: expected null, or an integer from 0 to 20",
        ),
        (GOOD | {"echo": True}, "echo", "invalid_value", "echo=true: expected false, or with logprobs, without stream"),
        (
            GOOD | {"echo": True, "logprobs": 1, "stream": True},
            "echo",
            "invalid_value",
            "echo=true: expected false, or",
        ),
        (GOOD | {"echo": True, "logprobs": 1, "max_tokens": 512}, "prompt", "context_length_exceeded", "is scored"),
        (GOOD | {"frequency_penalty": 3}, "frequency_penalty", "invalid_value", "=3: expected a number from -2 to 2"),
        (
            GOOD | {"logit_bias": {"5": 101}},
            "logit_bias",
            "invalid_value",
            'logit_bias={"5": 101}: expected an object with at most 300 numbers',
        ),
        (GOOD | {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", 'logit_bias={"x": 1}: expected an object'),
        (
            GOOD | {"logit_bias": {"101": 1}},
            "logit_bias",
            "invalid_value",
            "logit_bias has the token 101: expected ids",
        ),
        (GOOD | {"prompt": [[1], [101]]}, "prompt", "invalid_value", "the prompt contains the id 101: expected ids"),
        (
            GOOD | {"stop_token_ids": [7, 101]},
            "stop_token_ids",
            "invalid_value",
            "stop_token_ids has the token 101: expected ids in 0 .. 100",
        ),
        (GOOD | {"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value", "stop_token_ids.0=-1: expected stop_tok"),
        (GOOD | {"regex": "a"}, "regex", "invalid_value", "grammar: llguidance cannot read this tokenizer; can't"),
        (GOOD | {"regex": ""}, "regex", "invalid_value", 'regex="": expected a regular expression'),
        (GOOD | {"regex": "a", "response_format": JSON}, "regex", "invalid_value", 'regex="a": expected a regular exp'),
        (GOOD | {"skip_special_tokens": 0}, "skip_special_tokens", "invalid_type", "=0: expected true or false"),
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


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: Any = "{}") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


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
        (user(role="bob"), "messages", 'messages.1.role="bob": expected "system", "developer", "user", "assistant" or'),
        (user(role="tool"), "messages", "messages.1.tool_call_id is missing"),
        (user(role="tool", tool_call_id=5), "messages", "messages.1.tool_call_id=5: expected in a message with"),
        (user(tool_call_id="x"), "messages", 'messages.1.tool_call_id="x": expected in a message with the role'),
        (user(tool_calls=[called()]), "messages", "expected null, or in a message of the assistant a list"),
        (user(role="assistant", tool_calls=[called()]), "messages", "messages have tool_calls, and the chat template"),
        (user(role="assistant", tool_calls=[called(5)]), "messages", ".function.arguments=5: expected a string, which"),
        (user(role="assistant", tool_calls=[called() | {"x": 1}]), "messages", "messages.1.tool_calls.0.x: unknown"),
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
        (user(role="assistant", tool_calls=[{"id": "c"}]), "messages", "messages.1.tool_calls.0.function is missing"),
        (user(images=["x"]), "messages", "messages.1.images: unknown or not supported; expected one of role, content"),
        ({"prefix": [{"role": "bob", "content": ""}]}, "prefix", 'prefix.0.role="bob": expected "system"'),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'tools.0.type="web_search": expected "function"'),
        ({"tools": [tool("a b")]}, "tools", 'tools.0.function.name="a b": expected a name of at most 64 letters'),
        ({"tools": [tool("f")] * 129}, "tools", "expected null, or at most 128 tools"),
        ({"tools": [tool("f")]}, "tools", "tools are given, and the chat template of this model shows none"),
        ({"tool_choice": "required"}, "tools", "tools is missing"),
        (
            {"tools": [tool("f")], "prefix": [{"role": "user", "content": "a"}]},
            "tools",
            "tools are given with a prefix",
        ),
        ({"tools": [tool("f")], "chat_template_kwargs": {"tools": []}}, "tools", "tools are given twice"),
        ({"tool_choice": "any"}, "tool_choice", 'tool_choice="any": expected "none", "auto", "required" or'),
        ({"tools": [tool("f")], "tool_choice": chosen("g")}, "tool_choice", 'expected "none", "auto", "required" or'),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs=[1]: expected an object"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs", "at most 64 options"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "has 'tokenize'"),
        ({"response_format": {"type": "xml"}}, "response_format", 'response_format.type="xml": expected "text", "js'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema is missing"),
        (
            {"response_format": JSON | {"json_schema": {"schema": 1}}},
            "response_format",
            'json_schema={"schema": 1}: exp',
        ),
        (
            {"response_format": JSON | {"json_schema": {"schema": {}, "x": 1}}},
            "response_format",
            "expected with the type",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2: expected with logprobs, an integer from 0 to 20"),
        ({"max_completion_tokens": 513}, "max_completion_tokens", "max_completion_tokens=513: expected at most 512"),
        (user(content="ba " * 40), "messages", "maximum context length"),
        (user(content="fail" * 500), "messages", "chat template failed with TemplateError: cannot read failfail"),
        (user(content="fail" * 500), "messages", "(2,012 characters)"),
    ],
)
def test_bad_chats(serving: Serving, change: Any, param: str, said: str) -> None:
    """The error names the field that was sent, where it is."""
    status, answer = send(serving, "/v1/chat/completions", CHAT | change)
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


def test_every_field_says_what_it_accepts() -> None:
    for kind in (
        Completion,
        Chat,
        Message,
        Part,
        StreamOptions,
        ResponseFormat,
        Tool,
        Function,
        ToolCall,
        Called,
        Choice,
        Responses,
        Said,
        FunctionCall,
        FunctionOutput,
        Thought,
        items.Part,
    ):
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
        assert found["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"]
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


def test_log_probs_that_are_not_asked_for(serving: Serving) -> None:
    for nothing in (None, False):
        assert send(serving, "/v1/completions", GOOD | {"logprobs": nothing})[1]["choices"][0]["logprobs"] is None
    assert send(serving, "/v1/completions", GOOD | {"logprobs": 0})[1]["choices"][0]["logprobs"] is not None


def test_options_of_the_chat_template(serving: Serving) -> None:
    usual = send(serving, "/v1/chat/completions", CHAT)[1]["usage"]["prompt_tokens"]
    for options in ({"chat_template_kwargs": {"twice": True}}, {"reasoning_effort": "low"}):
        assert send(serving, "/v1/chat/completions", CHAT | options)[1]["usage"]["prompt_tokens"] == usual + 1
