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
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),
    (Hermes, '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>', Said(calls=(GET,))),
    (Llama, "Hello {", Said("Hello {")),
    (Llama, f' {{"name": "add", "parameters": {JSON}}}', Said(calls=(ADD,))),
    (Llama, f'<|python_tag|>{{"name": "add", "parameters": {JSON}}}; {{"name": "get"}}', Said(calls=(ADD, GET))),
    (Llama, '{"name": "get"} and more', None),
    (Llama, '{"a": 1}', None),
    (Llama, "<|python_tag|>print(1)", None),
    (Llama, "<|pyth", None),
    (Llama, "  ", None),
    (Llama, "{" * 5000, None),
    (Mistral, f'[TOOL_CALLS][{{"name": "add", "arguments": {JSON}}}, {{"name": "get"}}]', Said(calls=(ADD, GET))),
    (Mistral, f"Look: [TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]get{{}}", Said("Look: ", calls=(ADD, GET))),
    (Mistral, "[TOOL_CALLS]get[CALL_ID]a1[ARGS]{}", Said(calls=(GET,))),
    (Mistral, "[TOOL_CALLS]add[ARGS]{", None),
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
    (
        Harmony,
        "<|channel|>commentary to=functions.f<|message|>{",
        Said("<|channel|>commentary to=functions.f<|message|>{"),
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


def test_content_is_not_held_back() -> None:
    """Text that cannot begin a call is said at once."""
    for make in (Hermes, Mistral, Llama):
        assert make().add("Hello", last=False) == Said("Hello")
    thinking = Thinking(Plain(), begun=False)
    assert thinking.add("<think>so", last=False) == Said(reasoning="so")
    harmony = Harmony()
    assert harmony.add("<|channel|>analysis<|message|>so", last=False) == Said(reasoning="so")
