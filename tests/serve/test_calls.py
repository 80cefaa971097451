"""The same content, reasoning and calls come out of a text, however it is cut into pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvjax.serve.calls import Hermes, Llama, Mistral
from kvjax.serve.dividing import Call, Divider, Plain, Said, Thinking
from kvjax.serve.harmony import Harmony

ADD = Call("add", '{"a": 1, "b": [2.5, "é"]}')
GET = Call("get", "{}")
JSON = '{"a": 1, "b": [2.5, "é"]}'
TOOL = f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>'
CASES: list[tuple[Callable[[], Divider], str, Said | None]] = [
    (Plain, "a <tool_call>", Said("a <tool_call>")),
    (Hermes, "no calls < here\n", Said("no calls < here\n")),
    (Hermes, TOOL, Said(calls=(ADD,))),
    (
        Hermes,
        f'I look.\n\n{TOOL}\n<tool_call>{{"name": "get"}}</tool_call>\n and \n',
        Said("I look.and \n", calls=(ADD, GET)),
    ),
    (Hermes, TOOL.removesuffix("\n</tool_call>"), Said(calls=(ADD,))),
    (Hermes, 'a <tool_call>{"name": "ad', Said('a<tool_call>{"name": "ad')),
    (Hermes, "<tool_call>{'name'}</tool_call> x", Said("<tool_call>{'name'}</tool_call> x")),
    (Hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
    (Hermes, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
    (Hermes, '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>', Said(calls=(GET,))),
    (Hermes, '<tool_call>{"arguments": {}, "name": "get"}</tool_call>', Said(calls=(GET,))),
    (
        Hermes,
        f'<tool_call>{{"name" : "a\\"b" ,"arguments":{JSON}, "id": 1}} x</tool_call>',
        Said(" x", calls=(Call('a"b', JSON),)),
    ),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a":  NaN}}</tool_call>', Said(calls=(Call("f", '{"a":  NaN}'),))),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": {</tool_call>b', Said("b", calls=(Call("f", '{"a": {'),))),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}</tool_call>', Said(calls=(Call("f", "{}"),))),
    (Hermes, '<tool_call>{"name": "f", "arguments": {} x</tool_call>', Said(" x", calls=(Call("f", "{}"),))),
    (
        Hermes,
        '<tool_call>{"name": "f", "arguments": {"a": "}\\"} {\\\\"}}</tool_call>',
        Said(calls=(Call("f", '{"a": "}\\"} {\\\\"}'),)),
    ),
    (Llama, "Hello {", Said("Hello {")),
    (Llama, f' {{"name": "add", "parameters": {JSON}}}', Said(calls=(ADD,))),
    (Llama, f'<|python_tag|>{{"name": "add", "parameters": {JSON}}}; {{"name": "get"}}', Said(calls=(ADD, GET))),
    (Llama, '{"name": "get"} and more', Said(" and more", calls=(GET,))),
    (Llama, '{"a": 1} and {"name": "get"}', None),
    (Llama, ' ; {"a": 1}', None),
    (Llama, '{"name": "add", "parameters": {"a', Said(calls=(Call("add", '{"a'),))),
    (Llama, '{"name": "get"};{"b": 1}', Said(';{"b": 1}', calls=(GET,))),
    (Llama, f'{{"name": "get"}}\n<|python_tag|> {{"name": "add", "parameters": {JSON}}} ;', Said(calls=(GET, ADD))),
    (Llama, "<|python_tag|>", None),
    (Llama, "<|python_tag|>print(1)", None),
    (Llama, "<|pyth", None),
    (Llama, "  ", None),
    (Llama, "{" * 5000, None),
    (Mistral, f'[TOOL_CALLS][{{"name": "add", "arguments": {JSON}}}, {{"name": "get"}}]', Said(calls=(ADD, GET))),
    (Mistral, f"Look: [TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]get{{}}", Said("Look: ", calls=(ADD, GET))),
    (Mistral, "[TOOL_CALLS]get[CALL_ID]a1[ARGS]{}", Said(calls=(GET,))),
    (Mistral, f"[TOOL_CALLS]get{{}} \n[TOOL_CALLS] add[ARGS] {JSON}\n so", Said("so", calls=(GET, ADD))),
    (Mistral, f'[TOOL_CALLS] [ {{"name": "add", "arguments": {JSON}}} ] so', Said("so", calls=(ADD,))),
    (Mistral, "[TOOL_CALLS]add[ARGS]{", Said(calls=(Call("add", "{"),))),
    (Mistral, "[TOOL_CALLS]add it {", None),
    (Mistral, '[TOOL_CALLS][{"a": 1}, {"name": "get"}] so', None),
    (Mistral, '[TOOL_CALLS][{"name": "get"}, {"a": 1}] so', Said(', {"a": 1}] so', calls=(GET,))),
    (Mistral, "[TOOL_CALLS] [ ", None),
    (Mistral, "[TOOL", None),
    (
        Harmony,
        "<|channel|>analysis<|message|>I < think<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{JSON}",
        Said("", "I < think", (ADD,)),
    ),
    (
        Harmony,
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.get<|channel|>commentary json"
        "<|message|>{}<|call|>",
        Said("First.", "", (GET,)),
    ),
    (
        Harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b <|",
        Said("b <|", "a"),
    ),
    (Harmony, "<|channel|>final<|message|>done<|return|>", Said("done")),
    (Harmony, "plain", Said("plain")),
    (Harmony, "<|channel|>commentary to=functions.f<|message|>{", Said(calls=(Call("f", "{"),))),
    (Harmony, "<|channel|>commentary to=functions.get<|message|> <|call|>", Said(calls=(GET,))),
    (
        Harmony,
        "<|channel|>commentary to=functions.f<|message|>[1]<|call|>",
        Said("<|channel|>commentary to=functions.f<|message|>[1]"),
    ),
    (
        lambda: Thinking(Hermes(), begun=False),
        f"<think>\nwhy </thin\n</think>\n\nSo {TOOL}",
        Said("So", "\nwhy </thin\n", (ADD,)),
    ),
    (lambda: Thinking(Plain(), begun=True), "why</think>\n\nSo <think>", Said("So <think>", "why")),
    (lambda: Thinking(Plain(), begun=False), "\n<thin", None),
    (lambda: Thinking(Plain(), begun=False), "So <think>a</think>", None),
    (lambda: Thinking(Plain(), begun=True), "why not", Said(reasoning="why not")),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_any_pieces(make: Callable[[], Divider], text: str, expected: Said | None) -> None:
    """None: the text is content as it stands."""
    expected = expected or Said(text)
    rng = random.Random(0)
    cuts = [[], range(1, len(text)), *(sorted(rng.sample(range(len(text)), min(5, len(text)))) for _ in range(20))]
    for cut in cuts if len(text) < 1000 else cuts[:1]:
        divider, said = make(), Said()
        for start, end in zip([0, *cut], [*cut, len(text)], strict=True):
            said = said.then(divider.add(text[start:end], last=False))
        said = said.then(divider.add("", last=True))
        assert said == expected
    at_once = make().add(text, last=True)
    assert at_once == expected


def test_arguments_are_not_held_back() -> None:
    """The first part of a call has its name, and the others are what came since then."""
    texts: dict[Callable[[], Divider], tuple[str, ...]] = {
        Hermes: ('<tool_call>{"name": "add", "arguments": {"a', '": "x</to', "ol", '"}}</tool_call>'),
        Llama: ('{"name": "add", "parameters": {"a', '": "x</to', "ol", '"}}'),
        Mistral: ('[TOOL_CALLS][{"name": "add", "arguments": {"a', '": "x</to', "ol", '"}}]'),
        Harmony: ('<|channel|>commentary to=functions.add<|message|>{"a', '": "x</to', "ol", '"}<|call|>'),
    }
    for make, pieces in texts.items():
        divider = make()
        said = [divider.add(text, last=False).calls for text in pieces]
        assert said[0] == (Call("add", '{"a'),)
        assert said[1]
        assert not [call.name for calls in said[1:] for call in calls if call.name is not None]
        assert "".join(call.arguments for calls in said for call in calls) == '{"a": "x</tool"}'
    held = Hermes()
    held.add(texts[Hermes][0], last=False)
    assert held.add('": "x</tool_c', last=False) == Said(calls=(Call(None, '": "x'),))
    assert Mistral().add("[TOOL_CALLS]add[ARGS]{", last=False) == Said(calls=(Call("add", "{"),))


def test_content_is_not_held_back() -> None:
    """Text that cannot begin a call is said at once."""
    for make in (Hermes, Mistral, Llama):
        assert make().add("Hello", last=False) == Said("Hello")
    thinking = Thinking(Plain(), begun=False)
    assert thinking.add("<think>so", last=False) == Said(reasoning="so")
    harmony = Harmony()
    assert harmony.add("<|channel|>analysis<|message|>so", last=False) == Said(reasoning="so")
