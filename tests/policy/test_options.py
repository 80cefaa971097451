"""The options of all presets and parts: their defaults, which are the papers'."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from inspect import signature
from typing import Any

import pytest

from kvjax import policies
from kvjax.policy import Drop, Part, Policy, Protect, Storage, TopTokens

DEFAULTS = {
    "adakv": {"alpha": 0.2, "normalise": None, "formula": "paper", "groups": 1},
    "attention_matching": {
        "queries": 256,
        "seed": 0,
        "merge.bias": True,
        "merge.ridge": 1.0,
        "merge.bound": 3.0,
    },
    "blockwise": {"block": 128},
    "cam": {"budget": 1024, "sinks": 4, "tokens": 32, "form": "bernoulli", "group": "mean", "every": 1, "seed": 0},
    "capkv": {"budget": 1024, "tau": 5.0, "sinks": 4, "future": 512, "epsilon": 1e-6},
    "chunkkv": {"length": 20},
    "compactor": {
        "budget": 1024,
        "chunk": 256,
        "sketch": 48,
        "blend": 0.5,
        "seed": 0,
        "sinks": 8,
        "recent": 4,
    },
    "criticalkv": {"first": 0.5, "epsilon": 0.0001},
    "corm": {"budget": 1024, "window": 256, "recent": 256, "every": 1},
    "cur": {"budget": 1024, "kind": "product", "window": 16, "sinks": 4, "every": None},
    "d2o": {
        "budget": 0.2,
        "sinks": 4,
        "recent": 0.5,
        "layer_budgets": True,
        "dense_first": 2,
        "dense_last": 1,
        "every": 1,
        "merge.weights": "paper",
        "merge.alpha": 0.5,
        "merge.beta": 0.5,
    },
    "dms": {"threshold": -0.5, "window": 128, "budget": 1.0, "groups": 1},
    "duo_attention": {"gates": "demo", "sparsity": 0.5, "sinks": 128, "recent": 256, "every": 1, "groups": 1},
    "dynamickv": {
        "budget": 1024,
        "window": 8,
        "kernel": 7,
        "pool": "avg",
        "group": "mean",
        "interval": 4,
        "r_max": 10.0,
        "code_rounding": False,
    },
    "epikv": {
        "budget": 4096,
        "window": 64,
        "early": 10 / 32,
        "late": 21 / 32,
        "sinks": 0,
        "recent": 128,
        "every": 1,
    },
    "expected_attention": {
        "budget": 1024,
        "sinks": 4,
        "future": 512,
        "covariance": True,
        "value_norm": True,
        "epsilon": 0.0,
    },
    "expected_attention_stats": {
        "budget": 1024,
        "sinks": 4,
        "future": 512,
        "covariance": True,
        "value_norm": True,
        "epsilon": 0.0,
        "every": None,
    },
    "fastgen": {"budget": 1.0, "recovery": 0.95, "sinks": 4, "frequent": 0.3, "local": 0.3, "groups": 1},
    "finch": {"budget": 1024, "window": 32, "chunk": None, "rescale": True, "positions": "original"},
    "full": {},
    "gkv": {"budget": 1024, "window": 16, "decay": 0.8, "mix": 0.5, "threshold": 0.5, "every": 128},
    "h2o": {"budget": 1024, "recent": 0.5, "group": "mean", "every": 1, "sinks": 0},
    "headkv": {
        "budget": 1024,
        "importance": "demo",
        "group": 1,
        "beta": 1.5,
        "window": 8,
        "kernel": 7,
        "pool": "max",
        "groups": 1,
    },
    "key_rerotation": {},
    "keydiff": {"budget": 1024, "sinks": 0, "recent": 0, "every": None},
    "keydiff_codes": {"budget": 1920, "recent": 32, "bits": 8},
    "keyformer": {
        "budget": 0.6,
        "recent": 0.3,
        "temperature": 1.0,
        "growth": 0.01,
        "noise": "gumbel",
        "seed": 0,
        "every": 1,
    },
    "knorm": {"budget": 1024, "sinks": 0, "recent": 0, "every": None},
    "kvcompose": {
        "budget": 1024,
        "heads": "mean",
        "structured": True,
        "groups": 1,
        "min_tokens": 0,
        "first_layer": False,
        "recent": 0,
        "score.source": "replay",
        "score.prompts": "",
        "score.rows": "max",
        "score.group": "mean",
        "score.head_mean": True,
        "score.value_norm": "none",
    },
    "kvcrush": {
        "share": 0.25,
        "anchor": "mean",
        "pick": "centroid",
        "upper": 0.5,
        "granularity": "token",
        "page": 32,
        "bits": "kv",
    },
    "kvgrad": {
        "budget": 0.3,
        "sinks": 4,
        "level": "global",
        "groups": 1,
        "recent": 0,
        "score.sinks": 4,
        "score.chunk": 512,
        "score.instruction": "\n\nRepeat the previous context exactly.",
        "score.starting": "\n\nRepeat the part of the previous context exactly, starting with",
        "score.suffix": "\n",
    },
    "kvmerger": {
        "budget": 0.5,
        "recent": 0.34,
        "group": "mean",
        "every": None,
        "merge.heavy": 0.24,
        "merge.theta": 0.75,
        "merge.rule": "anchor",
        "merge.straddle": False,
        "merge.sigma": "mean",
        "merge.weights": "gauss",
        "merge.pivot": "score",
        "merge.seed": 0,
        "merge.count_bias": False,
    },
    "kvzip": {
        "budget": 0.3,
        "sinks": 4,
        "level": "global",
        "strict": False,
        "groups": 1,
        "recent": 0,
        "score.sinks": 4,
        "score.chunk": 2048,
        "score.instruction": "\n\nRepeat the previous context exactly.",
        "score.starting": "\n\nRepeat the part of the previous context exactly, starting with",
        "score.suffix": "\n",
        "score.normalise": False,
    },
    "lacache": {
        "budget": 1024,
        "run": 2,
        "keep": 1,
        "sinks": 4,
        "recent": 32,
        "positions": "original",
        "every": 1,
    },
    "lagkv": {"budget": 1024, "sinks": 4, "lag": 128, "cross": False, "every": None},
    "lazyeviction": {"budget": 1024, "window": 175, "alpha": 1e-4},
    "leverage_score": {"budget": 1024, "sketch": 48, "seed": 0, "sinks": 0, "recent": 0},
    "lookaheadkv": {"budget": 1024, "tokens": 32, "recent": 32, "kernel": 1, "pool": "max", "group": "mean"},
    "lukv": {"curve": "demo", "budget": 0.2, "sinks": 4, "recent": 1, "groups": 1},
    "morphkv": {
        "budget": 2048,
        "window": 32,
        "fusion": "sum",
        "every": 1,
        "dense_layers": 0,
        "normalise": "full",
        "group": "sum",
        "block": None,
    },
    "non_causal_attention": {"budget": 1024, "chunk": 256, "sinks": 0, "recent": 0},
    "observed_attention": {"budget": 1024, "group": "mean", "sinks": 0, "recent": 0, "every": None},
    "per_layer": {"shares": (1.5, 1.25, 0.75, 0.5)},
    "pyramidkv": {
        "budget": 1024,
        "window": 8,
        "kernel": 7,
        "pool": "max",
        "group": "mean",
        "beta": 20,
        "formula": "paper",
    },
    "qfilter": {"budget": 1024, "sinks": 0, "recent": 0, "every": None},
    "quantize": {"bits": 8, "group": None},
    "random": {"budget": 1024, "seed": 0, "sinks": 0, "recent": 0, "every": None},
    "restorekv": {"tokens": 8},
    "restkv": {"budget": 1024, "window": 32, "alpha": 0.3, "kernel": 5, "reach": 2000},
    "rising": {"share": 0.5, "every": 1},
    "rkv": {"budget": 1024, "window": 8, "kernel": 7, "mix": 0.07, "threshold": 0.5, "every": 128},
    "roco": {"budget": 1024, "exempt": 0.3, "recent": 10, "sinks": 0, "every": 1},
    "scissorhands": {"budget": 1024, "window": 400, "recent": 10, "drop": 0.5},
    "simlayerkv": {"budget": 1.0, "threshold": 0.9, "sinks": 4, "recent": 1024, "last": 1},
    "snapkv": {"budget": 1024, "window": 32, "kernel": 7, "pool": "max", "group": "mean"},
    "streaming_llm": {"budget": 1024, "sinks": 4, "positions": "original", "every": 1},
    "think": {"ratio": 0.4, "window": 32, "recent": 32},
    "tova": {"budget": 1024, "recent": 0, "every": 1},
    "triattention": {"budget": 2048, "sinks": 0, "recent": 128, "every": 128, "farthest": 65536},
    "vase": {"budget": 1024, "window": 64, "large": 0.25, "kernel": 5, "sinks": 4, "seed": 0, "every": 64},
    "zipcache": {"salient": 0.6, "bits": 4, "other_bits": 2, "window": 64, "queries": 64, "seed": 0},
}


def numbers(annotation: Any) -> str:
    """What an annotation has of "int | float"."""
    return " | ".join(kind for kind in str(annotation).split(" | ") if kind in ("int", "float"))


def options(accepted: Mapping[str, inspect.Parameter], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """The name of each option, those of parts dotted, its default and its annotation."""
    for name, parameter in accepted.items():
        default = parameter.default
        if isinstance(default, Policy):
            continue
        if isinstance(default, Part):
            own = inspect.signature(type(default)).parameters
            inner = {field: own[field].replace(default=getattr(default, field)) for field in own}
            yield from options(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, default, str(parameter.annotation)


def options_of(preset: str) -> list[tuple[str, Any, str]]:
    return list(options(inspect.signature(policies.PRESETS[preset]).parameters))


@pytest.mark.parametrize("preset", DEFAULTS)
def test_defaults(preset):
    assert {name: default for name, default, _ in options_of(preset)} == DEFAULTS[preset]


WORDS = [
    (preset, name, words)
    for preset in policies.PRESETS
    for name, _, annotation in options_of(preset)
    if (words := re.findall(r"'(\w+)'", annotation))
]


@pytest.mark.parametrize(("preset", "name", "words"), WORDS)
def test_a_preset_refuses_words_that_an_option_has_not(preset, name, words):
    with pytest.raises(ValueError, match=f"^{preset}: .*='zebra': expected ") as refusal:
        policies.parse(f"{preset}:{name}=zebra")
    assert all(repr(word) in str(refusal.value) for word in words)


TRUTHS = [(preset, name) for preset in policies.PRESETS for name, _, kind in options_of(preset) if "bool" in kind]


@pytest.mark.parametrize(("preset", "name"), TRUTHS)
def test_a_preset_refuses_what_is_neither_true_nor_false(preset, name):
    """In Python, where a text such as "no" would count as True."""
    owner, _, own = name.rpartition(".")
    given: dict[str, Any] = {own: "no"}
    if owner:
        given = {owner: replace(signature(policies.PRESETS[preset]).parameters[owner].default, **given)}
    with pytest.raises(ValueError, match=f"^{preset}: {own}='no': expected True or False$"):
        policies.PRESETS[preset](**given)


PROTECTING = [
    name for name, preset in policies.PRESETS.items() if {"window", "recent", "sinks"} & {*signature(preset).parameters}
]


@pytest.mark.parametrize("preset", PROTECTING)
def test_a_budget_that_is_too_small_is_refused_in_the_words_of_the_preset(preset):
    """Every term of the sum is an option of the preset with its value."""
    options = signature(policies.PRESETS[preset]).parameters
    least = policies.PRESETS[preset]().minimum
    if least == 1 or "budget" not in options:
        return
    with pytest.raises(ValueError, match=f"^{preset}: a budget of .*: expected .*, which is ") as refusal:
        policies.PRESETS[preset](budget=1)
    terms = str(refusal.value).rpartition(", which is ")[2].split(" + ")
    for name, equals, value in (term.partition("=") for term in terms):
        assert str(options[name].default) == value if equals else name.isdigit()


PARTS_DEFAULTS = {  # of parts that several methods have in common; those of all others are their preset's
    "Policy": {
        "select": TopTokens(),
        "merge": Drop(),
        "protect": Protect(),
        "every": None,
        "positions": "original",
        "storage": Storage(),
        "learned": None,
    },
    "LearnedTokens": {"count": 8},
    "Protect": {"sinks": 0, "recent": 0},
    "WindowAttention": {"pooling": None, "rescale": False, "normalise": "full", "sum_logits": False},
    "Reduction": {"group": "mean", "rows": "sum", "first": "rows"},
    "Pooling": {"kind": "max", "kernel": 7},
    "NonCausalAttention": {"chunk": 256, "sinks": 0, "recent": 0},
}


def parts_of(part: Any) -> Iterator[Any]:
    yield part
    for field in fields(part):
        if is_dataclass(inner := getattr(part, field.name)):
            yield from parts_of(inner)


# The base of lukv has the epsilon that the published curve was measured with.
@pytest.mark.parametrize("preset", [name for name in DEFAULTS if name != "lukv"])
def test_parts_have_the_defaults_of_their_preset(preset):
    for part in parts_of(getattr(policies, preset)()):
        given = {field.name: field.default for field in fields(part) if field.default is not MISSING}
        own = {name: getattr(part, name) for name in given}
        assert given == PARTS_DEFAULTS.get(type(part).__name__, own), type(part).__name__
