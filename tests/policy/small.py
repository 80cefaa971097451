"""Every preset with options that suit prompts of some twenty tokens, for tests of all that there are.

`preset` builds them with other options, for tests of other sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from kvjax import policies
from kvjax.policy import Part, Policy

BUDGET = 12
GATES = tuple((1.0, 0.1, 0.7, 0.2) if layer % 2 else (0.3, 0.9, 0.4, 0.8) for layer in range(2))
OPTIONS = {  # for each preset that has the option, itself or in one of its parts
    "budget": BUDGET,
    "window": 4,
    "kernel": 3,
    "recent": 4,
    "sinks": 2,
    "lag": 2,
    "length": 5,
    "heavy": 2,
    "future": 8,
    "drop": 0.25,
    "block": 2,
    "dense_first": 1,
    "dense_last": 0,
    "interval": 1,
    "chunk": 8,
    "tokens": 4,
    "instruction": (7, 60),
    "starting": (9, 4),
    "suffix": (33,),
    "gates": GATES,
    "importance": GATES,
    "curve": GATES,
    "shares": (1.25, 0.75),
}


@cache
def small(name: str) -> Policy:
    """The preset of that name; one that builds on another policy builds on a small one."""
    every = inspect.signature(policies.PRESETS[name]).parameters.get("every")
    seldom = every.default or 1 if every else 1  # a budget of few slots leaves no room to evict that seldom
    return preset(name, OPTIONS | ({"every": 2 if seldom > BUDGET else 4} if seldom > 1 else {}))


def preset(name: str, given: Mapping[str, Any]) -> Policy:
    """The preset with those of the options that it has, itself or in its parts.

    SnapKV is what others build on, and H2O is what those build on that evict while decoding.
    """
    parameters = inspect.signature(policies.PRESETS[name]).parameters
    options = {option: value for option, value in given.items() if option in parameters}
    base = "h2o" if "every" in parameters else "snapkv"
    options |= {option: preset(base, given) for option in ("base", "policy") if option in parameters}
    defaults: dict[str, Any] = {name: parameter.default for name, parameter in parameters.items()}
    for option in [name for name, default in defaults.items() if isinstance(default, Part)]:
        own = {field.name for field in fields(defaults[option])}
        options[option] = replace(defaults[option], **{key: value for key, value in given.items() if key in own})
    return policies.PRESETS[name](**options)
