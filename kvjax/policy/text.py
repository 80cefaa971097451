"""Policies as text: `morphkv:budget=512,window=32` on a command line, the repr of a policy in a saved cache."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvjax.checks import did_you_mean, shown
from kvjax.pallas_kernels import Reduction

from .learned import LearnedTokens
from .merge import Drop
from .part import Part
from .policy import Policy, Protect
from .select import TopTokens
from .storage import Storage

Presets: TypeAlias = Mapping[str, Callable[..., Policy]]
Options: TypeAlias = Mapping[str, inspect.Parameter]

_OTHERS = {part.__name__: part for part in (Drop, LearnedTokens, Policy, Protect, Reduction, Storage, TopTokens)}


def parse(text: str, presets: Presets, parts: Mapping[str, type[Part]]) -> Policy:
    """Returns the policy of a text, given all presets and parts by name. `kvjax.policies.parse` documents it."""
    text = text.strip()
    if text.startswith("Policy("):
        return _build(text, parts)
    name, _, rest = text.partition(":")
    if name not in presets:
        raise ValueError(f"unknown policy {shown(name)}: {_nearest(name, presets)}")
    given: dict[str, str] = {}
    for item in filter(None, _items(rest)):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{shown(item)} in {shown(text)}: expected option=value")
        if option in given:
            raise ValueError(f"{shown(text)} says {option} twice: expected once")
        given[option] = value
    return _preset(name, given, presets)


def _nearest(name: Any, presets: Presets) -> str:
    """Suggests presets for a name that is none."""
    examples = f"expected one of {len(presets)} presets of docs/methods/index.md, such as full, snapkv or morphkv"
    return did_you_mean(name, presets).removeprefix("; ") or examples


def _items(options: str) -> list[str]:
    """Splits a text at its commas, except for those within a tuple: "budget=8", "shares=(1.5,0.5)"."""
    items: list[str] = []
    within = False
    for piece in options.split(","):
        if within:
            items[-1] += f",{piece}"
        else:
            items.append(piece)
        value = items[-1].partition("=")[2].strip()
        within = value.startswith("(") and value.count("(") > value.count(")")
    return items


def _preset(name: str, given: Mapping[str, str], presets: Presets) -> Policy:
    """Returns the preset with its options as text. Options of a policy or a part within it have dotted names."""
    return presets[name](**_values(name, "", given, inspect.signature(presets[name]).parameters, presets))


def _values(name: str, prefix: str, given: Mapping[str, str], accepted: Options, presets: Presets) -> dict[str, Any]:
    """Parses the values of options.

    Args:
        name: the preset.
        prefix: what precedes the names of these options: "" for those of the preset itself, "merge." for those of its
            option `merge`.
        given: the text of each option.
        accepted: all options with their defaults.
        presets: all presets by name.
    """
    own: dict[str, str] = {}
    inner: dict[str, dict[str, str]] = {}
    for dotted, text in given.items():
        option, dot, rest = dotted.partition(".")
        if option not in accepted:
            names = _names(prefix, accepted)
            near = did_you_mean(prefix + option, names.split(", "))
            raise ValueError(f"{name} has no option {shown(prefix + option)}: expected {names or 'none'}{near}")
        if dot:
            inner.setdefault(option, {})[rest] = text
        else:
            own[option] = text
    values: dict[str, Any] = {}
    for option in {**own, **inner}:
        parameter, full, rest_of = accepted[option], prefix + option, inner.get(option, {})
        if (fields := _fields(parameter.default)) is not None:
            if option in own:
                raise ValueError(
                    f"{name}: {full}={own[option]}: expected its own options, {_names(f'{full}.', fields) or 'none'}"
                )
            inside = _values(name, f"{full}.", rest_of, fields, presets)
            try:
                values[option] = dataclasses.replace(parameter.default, **inside)
            except ValueError as error:
                raise ValueError(f"{name}: {full}.{error}") from None
        elif option not in own and isinstance(parameter.default, Policy):
            raise ValueError(f"{name}: options of {full} without {full} itself: expected {full}=PRESET first")
        elif rest_of and not isinstance(parameter.default, Policy):
            raise ValueError(
                f"{name}: {full} is no policy and no part, so it has no option {shown(next(iter(rest_of)))}"
            )
        else:
            values[option] = _literal(own[option])
            _check_kind(name, full, values[option], parameter)
            if isinstance(parameter.default, Policy):
                if values[option] not in presets:
                    raise ValueError(f"{name}: {full}={shown(values[option])}: {_nearest(values[option], presets)}")
                values[option] = _preset(values[option], rest_of, presets)
    return values


def _fields(default: Any) -> Options | None:
    """Returns the options of a part, with the values that they have in it as defaults; None for anything else."""
    if not isinstance(default, Part):
        return None
    fields = inspect.signature(type(default)).parameters
    return {option: field.replace(default=getattr(default, option)) for option, field in fields.items()}


def _names(prefix: str, accepted: Options) -> str:
    """Returns the names of all options, those of parts dotted."""
    names = []
    for option, parameter in accepted.items():
        fields = _fields(parameter.default)
        names.append(prefix + option if fields is None else _names(f"{prefix}{option}.", fields))
    return ", ".join(filter(None, names))


def _literal(text: str) -> Any:
    """Returns the literal that a text spells, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two are of deeply nested text
        return text


def _check_kind(name: str, option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Raises ValueError for a word where a number is expected, and the other way round. Presets judge tuples."""
    default, annotation = parameter.default, str(parameter.annotation)
    boolean = isinstance(default, bool) or "bool" in annotation
    judged_later = isinstance(value, tuple) and not boolean and not isinstance(default, Policy)
    if (value is None and default is None) or judged_later:
        return
    wants = bool if boolean else str if isinstance(default, str | Policy) else None
    given = next((kind for kind in (bool, str) if isinstance(value, kind)), None)
    word_or_number = wants is str and given is None and not {"int", "float"}.isdisjoint(annotation.split(" | "))
    if given is not wants and not word_or_number:
        other = "a tuple" if isinstance(default, tuple) else "a number"
        kind = {bool: "True or False", str: "a word", None: other}[wants]
        raise ValueError(f"{name}: {option}={shown(value)} is not {kind} (the default is {shown(default)})")


def _build(text: str, parts: Mapping[str, type[Part]]) -> Policy:
    """Evaluates the repr of a policy: calls of parts with keywords and literals, nothing else."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.args:
                raise ValueError(f"{node.func.id} has a value without a name: expected NAME=VALUE for each")
            build: Callable[..., Any] | None = _OTHERS.get(node.func.id) or parts.get(node.func.id)
            if build is None:
                near = did_you_mean(node.func.id, [*_OTHERS, *parts])
                raise ValueError(f"unknown part {node.func.id}: expected one of kvjax.parts{near}")
            if not any(keyword.arg is None for keyword in node.keywords):
                return build(**{str(keyword.arg): value(keyword.value) for keyword in node.keywords})
        return ast.literal_eval(node)

    try:
        policy = value(ast.parse(text, mode="eval").body)
    except (AttributeError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{shown(text)} describes no policy of this version: {error}") from error
    assert isinstance(policy, Policy)
    return policy
