"""Grammars of required calls and forms accept what the dividers read, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from kvjax.decoding.grammars import Grammars
from kvjax.serve.dialects import Template
from kvjax.serve.functions import Tool
from kvjax.serve.grammars import Writer
from tests.serve.scripted import scripted
from tests.serve.test_tools import FORMS, TOOLS

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra `serve`)")

ARGS = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
GOOD = {
    "hermes": ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'],
    "llama": ['{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1, "b": 2}}'],
    "mistral": ['[TOOL_CALLS][{"name": "add", "arguments": {"a":1, "b":2}}, {"name": "now", "arguments": {}}]'],
    "harmony": [
        FORMS["harmony"][0],
        "<|channel|>analysis<|message|>Hm < {<|end|><|start|>assistant" + FORMS["harmony"][0],
    ],
}
BAD = {
    "hermes": ["It is", '<tool_call>\n{"name": "sub"', '<tool_call>\n{"name": "add", "arguments": {"a": "x"'],
    "llama": ["It", '{"name": "now"}', '{"name": "add", "parameters": {"b"'],
    "mistral": ["[{", "[TOOL_CALLS]add"],
    "harmony": ["<|channel|>final", "<|channel|>commentary to=functions.sub"],
}


def accepted(tokenizer: Any, grammar: Any, text: str) -> bool | None:
    """Whether a text is complete; None if a token of it is not allowed."""
    (end,) = tokenizer("</s>")["input_ids"]
    matcher = Grammars(tokenizer, len(tokenizer), [end]).matcher(grammar, [end])
    for token in tokenizer(text)["input_ids"]:
        if not bits(matcher.allowed())[token]:
            return None
        if matcher.take(token):
            return True
    return bool(bits(matcher.allowed())[end])


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


@pytest.mark.long(first=1)
@pytest.mark.parametrize("form", FORMS)
def test_required_calls(form: str) -> None:
    _, template, special = FORMS[form]
    if form == "harmony":
        special = [*special, "<|end|>", "<|start|>"]
    _, tokenizer = scripted(["x"], template, special)
    tools = [Tool.model_validate(tool).document for tool in TOOLS]
    found = Template.of(tokenizer)
    grammar = found.grammar(None, tools=tools, required=True, several=True, options={})
    for text in GOOD[form]:
        assert accepted(tokenizer, grammar, text), text
        divider = found.reading(tools=True, options={}, most_calls=9).divider()
        calls = [(call.name, json.loads(call.arguments)) for call in divider.add(text, last=True).calls]
        assert ("add", {"a": 1, "b": 2}) in calls or form == "llama"
        assert accepted(tokenizer, grammar, text[:-1]) is not True
    for text in BAD[form]:
        assert accepted(tokenizer, grammar, text) is None, text
    assert found.grammar(None, tools=tools, required=False, several=True, options={}) is None


def test_mistral_with_named_arguments() -> None:
    _, tokenizer = scripted(["x"], "{{ tools }}{# [TOOL_CALLS] [ARGS] #}", ["[TOOL_CALLS]", "[ARGS]"])
    tools = [Tool.model_validate(tool).document for tool in TOOLS]
    grammar = Template.of(tokenizer).grammar(None, tools=tools, required=True, several=True, options={})
    assert accepted(tokenizer, grammar, ARGS)
    assert accepted(tokenizer, grammar, ARGS + "[TOOL_CALLS]now[ARGS]{}")
    assert accepted(tokenizer, grammar, "[TOOL_CALLS][") is None


@pytest.mark.parametrize("token", [True, False])
def test_content_after_reasoning_or_in_place_of_calls(token: bool) -> None:
    """`</think>` may be a token of the vocabulary or text."""
    _, tokenizer = scripted(["x"], FORMS["hermes"][1], ["<think>", "</think>"] if token else [])
    tokenizer.chat_template += "{# </think> #}{{ '<think>' if thinking is defined }}"
    tools = [Tool.model_validate(tool).document for tool in TOOLS]

    def content(writer: Writer) -> str:
        return writer.regex("[0-9/]+\\/\n")

    found = Template.of(tokenizer)
    grammar = found.grammar(content, tools=tools, required=False, several=False, options={})
    call = GOOD["hermes"][0]
    for text in ("12//\n", "<think>\nwhy < </think>\n\n3/\n", "<think></think>" + call, call):
        assert accepted(tokenizer, grammar, text), text
    for text in ("twelve", "<think></think>x", call + "1"):
        assert not accepted(tokenizer, grammar, text) or text.startswith(call)
    begun = found.grammar(content, tools=(), required=False, several=False, options={"thinking": True})
    assert accepted(tokenizer, begun, "so</think>1/\n")
    assert accepted(tokenizer, begun, "1/\n") is False  # all of it is reasoning


def test_a_pattern_that_python_has_escaped() -> None:
    _, tokenizer = scripted(["x"])
    writer, text = Writer(tokenizer), "a/b\n\\c.\t"
    grammar = writer.grammar(writer.regex(re.escape(text)))
    assert accepted(tokenizer, grammar, text)


def test_the_final_channel() -> None:
    _, template, special = FORMS["harmony"]
    _, tokenizer = scripted(["x"], template, [*special, "<|end|>", "<|start|>"])
    found = Template.of(tokenizer)
    grammar = found.grammar(
        lambda writer: writer.json({"const": 1}), tools=(), required=False, several=True, options={}
    )
    before = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    for text in ("<|channel|>final<|message|>1", before + "<|channel|>final<|message|>1"):
        assert accepted(tokenizer, grammar, text)
    assert accepted(tokenizer, grammar, "1") is None
