"""Policies as text: `morphkv:budget=512,window=32` on a command line, a policy's own repr in a saved cache."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import kvjax.parts
from kvjax.pallas_kernels import Reduction
from kvjax.policy import Policy, Protect

from .full import full
from .h2o import h2o
from .morphkv import morphkv
from .snapkv import snapkv
from .streaming_llm import streaming_llm
from .tova import tova

PRESETS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {preset.__name__: preset for preset in (full, streaming_llm, h2o, tova, snapkv, morphkv)}
)

_PARTS = {
    name: getattr(kvjax.parts, name) for name in kvjax.parts.__all__ if inspect.isclass(getattr(kvjax.parts, name))
}
_PARTS |= {part.__name__: part for part in (Policy, Protect, Reduction)}


def parse(text: str) -> Policy:
    """The policy that a text describes: `preset`, `preset:option=value,...`, or the repr of any policy.

    Raises:
        ValueError: for an unknown preset or option or a value it does not accept, naming those that are.
    """
    text = text.strip()
    if text.startswith("Policy("):
        return _build(text)
    name, _, rest = text.partition(":")
    if name not in PRESETS:
        raise ValueError(f"unknown policy {name!r}; accepted are {', '.join(PRESETS)}")
    accepted = inspect.signature(PRESETS[name]).parameters
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{item!r} in {text!r}: accepted is option=value")
        if option in options:
            raise ValueError(f"{text!r} says {option} twice; accepted is once")
        if option not in accepted:
            raise ValueError(f"{name} has no option {option!r}; accepted are {', '.join(accepted) or 'none'}")
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = value
        _check_kind(name, option, options[option], accepted[option])
    return PRESETS[name](**options)


def _check_kind(name: str, option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Words where numbers are due, and the other way round, before a preset is confused by them."""
    wants_word = isinstance(parameter.default, str)
    if wants_word != isinstance(value, str) or isinstance(value, bool):
        kind = "a word" if wants_word else "a number"
        raise ValueError(f"{name}: {option}={value!r} is not {kind} (the default is {parameter.default!r})")


def _build(text: str) -> Policy:
    """Evaluates a policy's repr: calls of parts with keywords and literals, nothing else."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PARTS and not node.args:
            return _PARTS[node.func.id](**{str(keyword.arg): value(keyword.value) for keyword in node.keywords})
        return ast.literal_eval(node)

    try:
        policy = value(ast.parse(text, mode="eval").body)
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} describes no policy of this version: {error}") from error
    assert isinstance(policy, Policy)
    return policy
