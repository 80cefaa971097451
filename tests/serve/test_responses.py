"""Responses, as OpenAI's client gets them: whole, in events, and with calls that it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvjax.serve.errors import ApiError
from kvjax.serve.parsing import parse
from kvjax.serve.responses import Responses
from tests.serve.serving import Serving, send
from tests.serve.test_tools import FORMS, TOOLS
from tests.serve.test_tools import serving as scripted_serving

FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
THINKS = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{# <think> </think> #}"


def parsed(**fields: Any) -> Responses:
    return parse(Responses, json.dumps({"model": "tiny", "input": "ba"} | fields).encode())


@pytest.fixture(scope="module")
def calling() -> Iterator[Serving]:
    yield from scripted_serving([FORMS["hermes"][0], "It is 3."], guided=True)


def test_text(serving: Serving) -> None:
    """The same as a chat with these messages."""
    messages: Any = [{"role": "system", "content": "ba"}, {"role": "user", "content": "ce di"}]
    chat = serving.client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    ask: Any = {"model": "tiny", "instructions": "ba", "temperature": 0, "max_output_tokens": 12}
    for given in ("ce di", [{"role": "user", "content": [{"type": "input_text", "text": "ce di"}]}]):
        out = serving.client.responses.create(**ask, input=given)
        assert out.output_text == chat.choices[0].message.content
        assert (out.status, out.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (out.instructions, out.max_output_tokens, out.tool_choice) == ("ba", 12, "auto")
        usage = out.usage
        assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 12)
        assert usage.input_tokens_details.cached_tokens == 0


def test_events_of_a_text(serving: Serving) -> None:
    ask: Any = {"model": "tiny", "input": "ce di", "temperature": 0, "max_output_tokens": 12}
    log_probs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = serving.client.responses.create(**ask, **log_probs)
    events = list(serving.client.responses.create(**ask, **log_probs, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*begin, *["output_text.delta"] * (len(kinds) - 8), *end]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    assert len(deltas) > 6
    (said,), (same,) = events[-1].response.output[0].content, whole.output[0].content
    assert said.text == same.text
    assert [token.token for token in said.logprobs] == [token.token for token in same.logprobs]
    assert len(same.logprobs) == 12
    assert all(len(token.top_logprobs) == 2 for token in same.logprobs)
    assert events[-1].response.usage.output_tokens == 12


@pytest.mark.long
def test_calls(calling: Serving) -> None:
    """The client sends the items of the response back with the output of a call, and gets the last answer."""
    asked: Any = [{"role": "user", "content": "1 + 2?"}]
    ask: Any = {"model": "tiny", "temperature": 0, "tools": FLAT}
    out = calling.client.responses.create(**ask, input=asked)
    said, *calls = out.output
    assert (said.type, said.content[0].text, out.status) == ("message", "One.", "completed")
    expected = [("add", {"a": 1, "b": 2}), ("now", {})]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "3"}
    after = [*asked, *out.output, result]
    assert calling.client.responses.create(**ask, input=after).output_text == "It is 3."
    chosen: Any = {"type": "function", "name": "add"}
    plain: Any = {"model": "tiny", "temperature": 0, "input": "1 + 2?"}
    with calling.client.responses.stream(**plain) as stream:
        final = stream.get_final_response()
    assert final.output_text == calling.client.responses.create(**plain).output_text
    one = calling.client.responses.create(**ask, input="1 + 2?", tool_choice=chosen, parallel_tool_calls=False)
    assert [item.name for item in one.output] == ["add"]

    events = list(calling.client.responses.create(**ask, input=asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    delta = "function_call_arguments.delta"
    assert kinds.count(delta) > 2
    begun = kinds.index(delta) - 1
    once = [kind for kind, before in zip(kinds[begun:], kinds[begun - 1 :], strict=False) if kind != before]
    called = ["output_item.added", delta, "function_call_arguments.done", "output_item.done"]
    assert once == [*called, *called, "completed"]
    texts: dict[str, str] = {}
    for event in events:
        if event.type == f"response.{delta}":
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    assert [*texts.values()] == [call.arguments for call in calls]
    ended = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in ended] == [*texts.values()]
    assert [item.type for item in events[-1].response.output] == [item.type for item in out.output]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2]
    assert [event.item.status for event in done] == ["completed"] * 3


@pytest.mark.slow
def test_reasoning() -> None:
    for one in scripted_serving(["<think>\nI add them.\n</think>\n\nIt is 3."], THINKS, ["<think>", "</think>"]):
        ask: Any = {"model": "tiny", "input": "1 + 2?", "temperature": 0}
        thought, said = one.client.responses.create(**ask).output
        assert thought.content[0].text.strip() == "I add them."
        assert said.content[0].text == "It is 3."
        log_probs: Any = {"include": ["message.output_text.logprobs"]}
        events = list(one.client.responses.create(**ask, **log_probs, stream=True))
        cut = one.client.responses.create(**ask, max_output_tokens=4)
        assert [item.status for item in cut.output] == ["completed", "incomplete"]
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought.content[0].text
        (_, last) = events[-1].response.output
        assert last.content[0].text == "It is 3."
        assert len(last.content[0].logprobs) == events[-1].response.usage.output_tokens


@pytest.mark.slow
def test_a_form(calling: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema | {"additionalProperties": False}}}
    out = calling.client.responses.create(model="tiny", input="1 + 2?", temperature=0, text=text)
    assert isinstance(json.loads(out.output_text)["a"], bool)


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "id": "fc", "status": "x"}
    given = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": "U"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        call,
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "O"},
        {"type": "reasoning", "summary": [], "encrypted_content": "E"},
        call,
        {"role": "assistant", "content": "B"},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c", "d")]
    assert parsed(instructions="I", input=given).dialogue == [
        {"role": "system", "content": "I"},
        {"role": "system", "content": "D"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "content": "O", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "assistant", "content": "B"},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ""}, "input", 'input="": expected a string, or a list of 1 to 4,096 items'),
        ({"input": []}, "input", "input=[]: expected a string, or a list"),
        ({"input": [{"type": "image"}]}, "input", 'input.0={"type": "image"}: expected input to be'),
        ({"input": [{"role": "user"}]}, "input", "input.0.content is missing"),
        ({"input": [{"role": "tool", "content": ""}]}, "input", 'input.0.role="tool": expected "system", "developer"'),
        ({"input": [{"type": "function_call"}]}, "input", "is missing"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "expected null: this server stores no responses"),
        ({"background": True}, "background", "background=true: expected null or false"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'tools.0.type="web_search": expected "function"'),
        ({"tools": [{"type": "function"}]}, "tools", "is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            'tools.0={"type": "function", "function": {"name": "f"}}: expected tools to be null, or at most 128',
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            'tool_choice={"type": "function", "function": {"name": "f"}}: expected "none", "auto", "required" or {"ty',
        ),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}},
            "text",
            'text.format={"type": "json_schema", "json_schema": {',
        ),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice", 'expected "none", "auto", "required" or'),
        ({"text": {"format": {"type": "xml"}}}, "text", 'text.format.type="xml": expected "text", "json_object" or'),
        ({"include": ["x"]}, "include", "include"),
        ({"n": 2}, "n", "n: unknown or not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2: expected with logprobs, an integer"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as told:
        parsed(**fields)
    assert (told.value.status, told.value.param) == (400, param)
    assert said in told.value.message


def test_errors_of_the_engine_name_the_field(serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        serving.client.responses.create(model="tiny", input="ba " * 40)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "input")
    status, answer = send(serving, "/v1/responses", {"model": "tiny", "input": "ba", "max_output_tokens": 513})
    assert (status, answer["error"]["param"]) == (400, "max_output_tokens")
