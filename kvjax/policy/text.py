"""Policies as text: `morphkv:budget=512,window=32` on a command line, the repr of a policy in a saved cache."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvjax.pallas_kernels import Reduction

from .part import Part
from .policy import Policy, Protect
from .storage import Storage

Presets: TypeAlias = Mapping[str, Callable[..., Policy]]

_OTHERS = {part.__name__: part for part in (Policy, Protect, Reduction, Storage)}


def parse(text: str, presets: Presets, parts: Mapping[str, type[Part]]) -> Policy:
    """The policy that a text describes, given all presets and parts by name. `kvjax.policies.parse` documents it."""
    text = text.strip()
    if text.startswith("Policy("):
        return _build(text, parts)
    name, _, rest = text.partition(":")
    if name not in presets:
        raise ValueError(f"unknown policy {name!r}: expected {', '.join(presets)}")
    given: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{item!r} in {text!r}: expected option=value")
        if option in given:
            raise ValueError(f"{text!r} says {option} twice: expected once")
        given[option] = value
    return _preset(name, given, presets)


def _preset(name: str, given: Mapping[str, str], presets: Presets) -> Policy:
    """The preset with its options as text. Options of a policy within it have dotted names."""
    accepted = inspect.signature(presets[name]).parameters
    options: dict[str, Any] = {}
    inner: dict[str, dict[str, str]] = {}
    for option, value in given.items():
        option, dot, rest = option.partition(".")
        if option not in accepted:
            raise ValueError(f"{name} has no option {option!r}: expected {', '.join(accepted) or 'none'}")
        if dot:
            inner.setdefault(option, {})[rest] = value
            continue
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = value
        _check_kind(name, option, options[option], accepted[option])
    for option in inner:
        if not isinstance(accepted[option].default, Policy):
            raise ValueError(f"{name}: {option} is no policy, so it has no option {next(iter(inner[option]))!r}")
        if option not in options:
            raise ValueError(f"{name}: options of {option} without {option} itself: expected {option}=PRESET first")
    for option, parameter in accepted.items():
        if option in options and isinstance(parameter.default, Policy):
            if options[option] not in presets:
                raise ValueError(f"{name}: {option}={options[option]!r}: expected {', '.join(presets)}")
            options[option] = _preset(options[option], inner.get(option, {}), presets)
    return presets[name](**options)


def _check_kind(name: str, option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Raises ValueError for a word where a number is expected, and the other way round."""
    default, annotation = parameter.default, str(parameter.annotation)
    if value is None and default is None:
        return
    boolean = isinstance(default, bool) or "bool" in annotation
    wants = bool if boolean else str if isinstance(default, str | Policy) else None
    given = next((kind for kind in (bool, str) if isinstance(value, kind)), None)
    word_or_number = wants is str and given is None and "float" in annotation
    if given is not wants and not word_or_number:
        kind = {bool: "True or False", str: "a word", None: "a number"}[wants]
        raise ValueError(f"{name}: {option}={value!r} is not {kind} (the default is {default!r})")


def _build(text: str, parts: Mapping[str, type[Part]]) -> Policy:
    """Evaluates the repr of a policy: calls of parts with keywords and literals, nothing else."""
    known: Mapping[str, Callable[..., Any]] = {**parts, **_OTHERS}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known and not node.args:
            return known[node.func.id](**{str(keyword.arg): value(keyword.value) for keyword in node.keywords})
        return ast.literal_eval(node)

    try:
        policy = value(ast.parse(text, mode="eval").body)
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} describes no policy of this version: {error}") from error
    assert isinstance(policy, Policy)
    return policy
