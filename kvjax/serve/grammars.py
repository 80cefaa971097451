"""The grammar that an answer must follow: required calls, the form of the content, and reasoning before either.

A grammar is in llguidance's Lark. Markers that the vocabulary has as one token are written as that token too, because
text of a grammar does not match special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.decoding.grammars import Grammar, lark_of_json

ANY, BLANK = r"/(.|\n)*/", r"/[ \n]*/"
WRITTEN = {"/": r"\/", "\n": r"\n"}  # characters that no regular expression of a grammar has as they stand


class Writer:
    """Writes the expressions of a grammar for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule, and returns its name."""
        self._rules.append(f"r{len(self._rules)}{options}: {body}")
        return f"r{len(self._rules) - 1}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that a schema accepts."""
        return self.rule(lark_of_json(schema))

    def regex(self, pattern: str) -> str:
        """Text that a regular expression matches."""
        escaped = re.sub(r"(\\[^\n])|\\?([\n/])", lambda found: found[1] or WRITTEN[found[2]], pattern)
        return self.rule(f"/{escaped}/")

    def text(self, *parts: str) -> str:
        """Text as it stands, of which parts that are one token may be that token."""
        return " ".join(map(self._part, parts))

    def until(self, name: str) -> str:
        """Any text up to a marker, with it."""
        rest = self.rule(ANY, f"[suffix={json.dumps(name)}]")
        token = self._backend.token_to_id(name)
        return rest if token is None else f"({self.rule(ANY)} <[{token}]> | {rest})"

    def grammar(self, start: str) -> Grammar:
        """The grammar that begins with an expression."""
        return Grammar.lark("\n".join([f"start: {start}", *self._rules]))

    def _part(self, name: str) -> str:
        token, quoted = self._backend.token_to_id(name) if name else None, json.dumps(name, ensure_ascii=False)
        return quoted if token is None else f"(<[{token}]> | {quoted})"


def _functions(writer: Writer, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The name of each function, and the rule of its arguments."""
    functions = [tool["function"] for tool in tools]
    return [(function["name"], writer.json(function["parameters"])) for function in functions]


def _objects(writer: Writer, tools: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """The rule of a call as an object."""
    calls = []
    for name, rule in _functions(writer, tools):
        begins = '{"name": ' + json.dumps(name) + f', "{arguments}": '
        calls.append(f"{writer.text(begins)} {rule} {writer.text('}')}")
    return writer.rule(" | ".join(calls))


def hermes(writer: Writer, tools: Sequence[Mapping[str, Any]], *, several: bool, template: str) -> str:
    """Calls of `kvjax.serve.calls.Hermes`."""
    opens, blank, closes = writer.text("<tool_call>"), writer.text("\n"), writer.text("</tool_call>")
    call = writer.rule(f"{opens} {blank} {_objects(writer, tools, 'arguments')} {blank} {closes}")
    return f"{call} ({blank} {call})*" if several else call


def llama(writer: Writer, tools: Sequence[Mapping[str, Any]], *, several: bool, template: str) -> str:
    """Calls of `kvjax.serve.calls.Llama`."""
    call = _objects(writer, tools, "parameters")
    return f"{call} ({writer.text('; ')} {call})*" if several else call


def mistral(writer: Writer, tools: Sequence[Mapping[str, Any]], *, several: bool, template: str) -> str:
    """Calls of `kvjax.serve.calls.Mistral`, in the form that the template has."""
    tag = writer.text("[TOOL_CALLS]")
    if "[ARGS]" in template:
        named = [f"{writer.text(name, '[ARGS]')} {rule}" for name, rule in _functions(writer, tools)]
        return f"({tag} ({' | '.join(named)})){'+' if several else ''}"
    call = _objects(writer, tools, "arguments")
    more = f"({writer.text(', ')} {call})*" if several else ""
    return f"{tag} {writer.text('[')} {call} {more} {writer.text(']')}"


def harmony(writer: Writer, tools: Sequence[Mapping[str, Any]], *, several: bool, template: str) -> str:
    """A call of `kvjax.serve.harmony.Harmony`, which ends the answer."""
    calls = []
    for name, rule in _functions(writer, tools):
        head = ("<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")
        calls.append(f"{writer.text(*head)} {rule}")
    return f"({' | '.join(calls)})"


def thought(writer: Writer, *, begun: bool) -> str:
    """Reasoning of `kvjax.serve.dividing.Thinking`, which an answer may have, and must end if the prompt began it."""
    rest = f"{writer.until('</think>')} {writer.rule(BLANK)}"
    return rest if begun else f"({writer.text('<think>')} {rest})?"


def analysis(writer: Writer) -> str:
    """A message of the analysis channel, which an answer may begin with."""
    head = writer.text("<|channel|>", "analysis", "<|message|>")
    return f"({head} {writer.until('<|end|>')} {writer.text('<|start|>', 'assistant')})?"


def final(writer: Writer, content: str) -> str:
    """A message of the final channel."""
    return f"{writer.text('<|channel|>', 'final', '<|message|>')} {content}"
