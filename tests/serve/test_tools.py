"""OpenAI's client gets the calls of a scripted model in every form, whole and in pieces, and answers them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

import kvjax
from kvjax.serve import Settings
from kvjax.serve.chat import Chat
from kvjax.serve.dialects import Template
from kvjax.serve.parsing import parse
from tests.serve.scripted import HERMES, SIZES, WHOLE, scripted
from tests.serve.serving import Serving, only, send, served

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}  # a scripted model would write digits without end
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": DIGIT, "b": DIGIT},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CHOICE: Any = {"type": "function", "function": {"name": "add"}}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "1 + 2?"}], "temperature": 0}
FORMS: dict[str, tuple[str, str, Sequence[str]]] = {
    "hermes": (
        'One.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        HERMES,
        (),
    ),
    "llama": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
        SIZES + "{# <|python_tag|> #}",
        ["<|python_tag|>"],
    ),
    "mistral": (
        'One.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]',
        SIZES + "{# [TOOL_CALLS] #}",
        ["[TOOL_CALLS]"],
    ),
    "harmony": (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>" + '{"a": 1, "b": 2}',
        SIZES + "{# <|channel|> #}",
        ["<|channel|>", "<|constrain|>", "<|message|>"],
    ),
}


def serving(
    scripts: Sequence[str], template: str = HERMES, special: Sequence[str] = (), longest: int = 16, guided: bool = False
) -> Iterator[Serving]:
    params, tokenizer = scripted(scripts, template, special)
    sizes = {"rows": 2, "max_prompt": longest, "max_new_tokens": 128}
    with kvjax.Engine(params, "full", **sizes, tokenizer=tokenizer, guided=guided) as engine:
        yield from served(only(engine, "full"), Settings(api_key="secret"))


class Signed:
    """A stand-in for a tokenizer whose chat template has a sign."""

    def __init__(self, sign: str) -> None:
        self.chat_template = sign


@pytest.fixture(
    scope="module", params=[pytest.param(form, marks=[pytest.mark.slow] if form != "hermes" else []) for form in FORMS]
)
def speaking(request: pytest.FixtureRequest) -> Iterator[tuple[str, Serving]]:
    script, template, special = FORMS[request.param]
    for one in serving([script, "It is 3."], template, special):
        yield request.param, one


def test_calls(speaking: tuple[str, Serving]) -> None:
    """Whole, in pieces, and an answer to the results that the client sends back with the calls."""
    form, one = speaking
    expected = [("add", {"a": 1, "b": 2}), ("now", {})][: 1 if form == "harmony" else 2]
    content = "One." if form in ("hermes", "mistral") else None
    choice = one.client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == expected
    assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == 9 for call in calls) == (form == "mistral")

    found: list[list[str]] = []
    text, parts, reasons = "", 0, []
    for event in one.client.chat.completions.create(**ASK, tools=TOOLS, stream=True, tool_choice="auto"):
        delta = event.choices[0].delta
        text += delta.content or ""
        reasons.append(event.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(found), "function")
                found.append([call.function.name, ""])
            assert (call.index, call.id is None) == (len(found) - 1, call.function.name is None)
            found[-1][1] += call.function.arguments
            parts += 1
    assert found == [[call.function.name, call.function.arguments] for call in calls]
    assert (text or None, parts > len(found)) == (content, form != "harmony")
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]

    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls[:1]]
    after = [*ASK["messages"], choice.message, *results]
    last = one.client.chat.completions.create(**ASK | {"messages": after}, tools=TOOLS).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("It is 3.", None, "stop")


@pytest.mark.long
def test_the_prompt_shows_tools_and_calls() -> None:
    """The checkpoint's template writes both, and gets the arguments of a call as an object."""
    script = FORMS["hermes"][0]
    template = (
        WHOLE + "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.b * 'x' }}{% endfor %}"
        "{# <tool_call> #}"
    )
    for one in serving([script, "It is 3."], template, longest=1024):
        prompts = [
            one.client.chat.completions.create(**ASK, **more).usage.prompt_tokens
            for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
        ]
        assert prompts[0] == prompts[1] < prompts[2] - 200
        plain = one.client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none").choices[0]
        assert (plain.message.content, plain.finish_reason) == (script, "stop")  # nobody reads calls in it
        first = one.client.chat.completions.create(**ASK, tools=TOOLS, parallel_tool_calls=False).choices[0]
        assert [call.function.name for call in first.message.tool_calls] == ["add"]
        stream = one.client.chat.completions.create(**ASK, tools=TOOLS, parallel_tool_calls=False, stream=True)
        parts = [call for event in stream for call in event.choices[0].delta.tool_calls or ()]
        assert {call.index for call in parts} == {0}
        arguments = "".join(call.function.arguments for call in parts)
        assert arguments == first.message.tool_calls[0].function.arguments
        sizes = []
        for number in (2, 12):
            call = {"name": "add", "arguments": json.dumps({"a": 1, "b": number}).replace(" ", "")}
            said: Any = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
            given = [*ASK["messages"], said, {"role": "tool", "tool_call_id": "c", "content": "3"}]
            sizes.append(
                one.client.chat.completions.create(**ASK | {"messages": given}, tools=TOOLS).usage.prompt_tokens
            )
        assert sizes[1] - sizes[0] == 1 + 10  # a digit, and ten of the letter
        cut = one.client.chat.completions.create(**ASK, tools=TOOLS, max_tokens=3).choices[0]
        assert (cut.message.tool_calls, cut.finish_reason) == (None, "length")


def test_a_call_that_the_limit_cuts(speaking: tuple[str, Serving]) -> None:
    """Its arguments break off, and the client can send them back."""
    form, one = speaking
    if form == "harmony":
        pytest.skip("its arguments are one token")
    ask = {**ASK, "tools": TOOLS}
    whole = one.client.chat.completions.create(**ask).choices[0].message.tool_calls[0].function.arguments
    found = (one.client.chat.completions.create(**ask, max_tokens=limit).choices[0] for limit in range(1, 40))
    cut = next(choice for choice in found if choice.message.tool_calls)
    begun = cut.message.tool_calls[0].function.arguments
    assert whole.startswith(begun)
    assert (len(begun) < len(whole), cut.finish_reason) == (True, "length")
    result = {"role": "tool", "tool_call_id": cut.message.tool_calls[0].id, "content": "3"}
    after = {"messages": [*ASK["messages"], cut.message, result]}
    assert one.client.chat.completions.create(**ask | after).choices[0].message.content == "It is 3."


def test_special_tokens_in_text(speaking: tuple[str, Serving]) -> None:
    """`skip_special_tokens: false` names them, but for end tokens; log-probabilities spell the same text."""
    form, one = speaking
    if form != "llama":
        pytest.skip("one form is enough")
    body = {"model": "tiny", "prompt": "<s0>", "max_tokens": 100, "temperature": 0, "logprobs": 0}
    script = FORMS[form][0]
    for skip, expected in ((True, script.removeprefix("<|python_tag|>")), (False, script)):
        choice = send(one, "/v1/completions", body | {"skip_special_tokens": skip})[1]["choices"][0]
        assert choice["text"] == expected
        spelled = "".join(choice["logprobs"]["tokens"])
        assert spelled == script + "</s>"  # a token that adds no text has its name
    ended = send(one, "/v1/completions", body | {"skip_special_tokens": False, "stop": "<|python_tag|>"})[1]["choices"]
    assert (ended[0]["text"], ended[0]["finish_reason"]) == ("", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_reasoning(special: Sequence[str]) -> None:
    """`<think>` in the template: reasoning is apart, also where the markers are special tokens."""
    template = HERMES + "{# </think> #}{{ '<think>' if thinking is defined }}"
    for one in serving(["<think>\nHow?</think>\n\nSo it is."], template, special):
        message = one.client.chat.completions.create(**ASK).choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("So it is.", "\nHow?")
        said = {"content": "", "reasoning_content": ""}
        for event in one.client.chat.completions.create(**ASK, stream=True):
            for name in said:
                said[name] += getattr(event.choices[0].delta, name, None) or ""
        assert said == {"content": "So it is.", "reasoning_content": "\nHow?"}
        again: Any = [{"role": "assistant", "content": "a", "reasoning_content": "b"}, *ASK["messages"]]
        assert one.client.chat.completions.create(**ASK | {"messages": again}).choices


def test_the_reasoning_of_earlier_turns() -> None:
    """It reaches the template under the name that it reads: gpt-oss has one place for reasoning and content."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for given in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "A", given: "R"}
        chat = parse(Chat, json.dumps(ASK | {"messages": [said, said | {"tool_calls": [call]}]}).encode())
        for sign, name in (
            ("<|channel|>", "thinking"),
            ("<tool_call>", "reasoning_content"),
            ("", "reasoning_content"),
        ):
            (prompt,) = chat.prompts(Template.of(Signed(sign)))
            assert [message[name] for message in prompt] == ["R", "R\n\nA" if sign == "<|channel|>" else "R"]
            assert [message["content"] for message in prompt] == ["A", "" if sign == "<|channel|>" else "A"]
            assert all(set(message) <= {"role", "content", "tool_calls", name} for message in prompt)


def test_markers_that_are_special_tokens() -> None:
    """Text leaves them out unless it is told not to."""
    names = ("<tool_call>", "<think>", "</think>")
    _, tokenizer = scripted(["x"], HERMES + "{# <think> </think> #}", names)
    template = Template.of(tokenizer)
    for tools, expected in ((True, names), (False, names[1:])):
        assert template.reading(tools=tools, options={}, most_calls=1).markers == expected


def test_names_that_no_tool_has() -> None:
    """A model may write any, and a client sends them back."""
    called = {"id": "c", "type": "function", "function": {"name": "add it", "arguments": "{}"}}
    chat = parse(Chat, json.dumps(ASK | {"messages": [{"role": "assistant", "tool_calls": [called]}]}).encode())
    assert chat.dialogue[0]["tool_calls"][0]["function"]["name"] == "add it"


def test_templates_that_cannot_be_read() -> None:
    for one in serving(["a"], "{{ tools }}{{ messages[0].content }}"):
        with pytest.raises(openai.BadRequestError, match="does not tell how it writes calls: expected a server with"):
            one.client.chat.completions.create(**ASK, tools=TOOLS)


@pytest.mark.long
def test_required_calls_and_forms() -> None:
    """A grammar has the model call, and write what a schema accepts, where the script has it do neither."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")
    for one in serving(["It is 3."], guided=True):
        create: Any = one.client.chat.completions.create
        for tool_choice, named in (("required", {"add", "now"}), (CHOICE, {"add"})):
            runs = [
                create(**ASK, tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False).choices[0]
                for _ in range(2)
            ]
            for choice in runs:
                (call, *_) = choice.message.tool_calls
                assert (choice.finish_reason, call.function.name in named) == ("tool_calls", True)
                assert json.loads(call.function.arguments).keys() == (
                    {"a", "b"} if call.function.name == "add" else set()
                )
            assert runs[0].message.content == runs[1].message.content
            arguments = [[call.function.arguments for call in choice.message.tool_calls] for choice in runs]
            assert arguments[0] == arguments[1]
        schema = {"type": "object", "properties": {"sum": {"enum": [3, 30]}}, "required": ["sum"]}
        formed = {
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema | {"additionalProperties": False}},
        }
        choice = create(**ASK, response_format=formed).choices[0]
        assert json.loads(choice.message.content)["sum"] in (3, 30)
        assert choice.finish_reason == "stop"
        choice = create(**ASK, tools=TOOLS, response_format=formed).choices[0]  # a call, or the form
        assert choice.message.tool_calls or json.loads(choice.message.content)["sum"] in (3, 30)
        choice = create(**ASK, extra_body={"regex": "[0-9]{3}-x"}).choices[0]
        assert re.fullmatch("[0-9]{3}-x", choice.message.content)
        refused = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}
        with pytest.raises(openai.BadRequestError, match="Invalid type: foo") as error:
            create(**ASK, response_format=refused)
        assert error.value.param == "response_format"
        assert create(**ASK).choices[0].message.content == "It is 3."
