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
from kvjax.protocols import Storage

from .adakv import adakv
from .cam import cam
from .chunkkv import chunkkv
from .criticalkv import criticalkv
from .d2o import d2o
from .duo_attention import duo_attention
from .dynamickv import dynamickv
from .expected_attention import expected_attention
from .finch import finch
from .full import full
from .h2o import h2o
from .keydiff import keydiff
from .keyformer import keyformer
from .knorm import knorm
from .kvcompose import kvcompose
from .kvcrush import kvcrush
from .kvmerger import kvmerger
from .kvzip import kvzip
from .lagkv import lagkv
from .morphkv import morphkv
from .pyramidkv import pyramidkv
from .quantize import quantize
from .random import random
from .scissorhands import scissorhands
from .snapkv import snapkv
from .streaming_llm import streaming_llm
from .tova import tova

_ALL = (
    full,
    streaming_llm,
    h2o,
    tova,
    snapkv,
    finch,
    pyramidkv,
    dynamickv,
    kvcompose,
    morphkv,
    kvmerger,
    cam,
    d2o,
    expected_attention,
    knorm,
    keydiff,
    lagkv,
    random,
    keyformer,
    scissorhands,
    kvcrush,
    chunkkv,
    criticalkv,
    quantize,
    adakv,
    kvzip,
    duo_attention,
)
PRESETS: Mapping[str, Callable[..., Policy]] = MappingProxyType({preset.__name__: preset for preset in _ALL})

_PARTS = {
    name: getattr(kvjax.parts, name) for name in kvjax.parts.__all__ if inspect.isclass(getattr(kvjax.parts, name))
}
_PARTS |= {part.__name__: part for part in (Policy, Protect, Reduction, Storage)}


def parse(text: str) -> Policy:
    """The policy that a text describes: `preset`, `preset:option=value,...`, or the repr of any policy.

    Where an option is itself a policy, its own options follow under its name: `kvcrush:base=h2o,base.budget=512`.

    Raises:
        ValueError: for an unknown preset or option or a value it does not accept, naming those that are.
    """
    text = text.strip()
    if text.startswith("Policy("):
        return _build(text)
    name, _, rest = text.partition(":")
    if name not in PRESETS:
        raise ValueError(f"unknown policy {name!r}; accepted are {', '.join(PRESETS)}")
    given: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{item!r} in {text!r}: accepted is option=value")
        if option in given:
            raise ValueError(f"{text!r} says {option} twice; accepted is once")
        given[option] = value
    return _preset(name, given)


def _preset(name: str, given: Mapping[str, str]) -> Policy:
    """The preset with options as text, those of a policy within it under a dotted name."""
    accepted = inspect.signature(PRESETS[name]).parameters
    options: dict[str, Any] = {}
    inner: dict[str, dict[str, str]] = {}
    for option, value in given.items():
        option, dot, rest = option.partition(".")
        if option not in accepted:
            raise ValueError(f"{name} has no option {option!r}; accepted are {', '.join(accepted) or 'none'}")
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
            raise ValueError(f"{name}: options of {option} without {option} itself; accepted is {option}=PRESET first")
    for option, parameter in accepted.items():
        if option in options and isinstance(parameter.default, Policy):
            if options[option] not in PRESETS:
                raise ValueError(f"{name}: {option}={options[option]!r}; accepted are {', '.join(PRESETS)}")
            options[option] = _preset(options[option], inner.get(option, {}))
    return PRESETS[name](**options)


def _check_kind(name: str, option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Words where numbers are due, and the other way round, before a preset is confused by them."""
    default = parameter.default
    wants = bool if isinstance(default, bool) else str if isinstance(default, str | Policy) else None
    given = next((kind for kind in (bool, str) if isinstance(value, kind)), None)
    word_or_number = wants is str and given is None and "float" in str(parameter.annotation)
    if given is not wants and not word_or_number:
        kind = {bool: "True or False", str: "a word", None: "a number"}[wants]
        raise ValueError(f"{name}: {option}={value!r} is not {kind} (the default is {default!r})")


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
