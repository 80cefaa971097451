"""The presets: each method with the defaults of its paper. `PRESETS` has them by name.

A preset is a function that returns a `Policy`, such as `kvjax.policies.snapkv(budget=1024)`. Installed packages add
theirs by entry points in `kvjax.presets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from kvjax.methods import registry
from kvjax.policy import Policy, text

PRESETS: Mapping[str, Callable[..., Policy]] = registry.presets()


def parse(description: str) -> Policy:
    """The policy that a text describes: `preset`, `preset:option=value,...`, or the repr of any policy.

    The options of an option that is itself a policy follow under its name: `kvcrush:base=h2o,base.budget=512`. The same
    holds for an option that is a part, such as a merge or a score, whose default they change:
    `kvmerger:budget=0.5,merge.theta=0.3`, `kvcrush:base=kvmerger,base.merge.theta=None`. A tuple is written as in
    Python: `per_layer:shares=(1.5,0.5)`.

    Raises:
        ValueError: for an unknown preset or option, or a value that it does not accept; the message names those that
            are accepted.
    """
    return text.parse(description, PRESETS, registry.parts())


def __getattr__(name: str) -> Callable[..., Policy]:
    if name.startswith("__"):  # Python asks for such names, as it imports
        raise AttributeError(name)
    try:
        return PRESETS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no preset {name!r}; there are {', '.join(PRESETS)}") from None


def __dir__() -> list[str]:
    return ["PRESETS", "parse", *PRESETS]


def _stated(part: object) -> int | float | None:
    """Returns the number of entries, or the share of a prompt, that a budget or the budget within it states."""
    if not is_dataclass(part):
        return None
    values = [getattr(part, field.name) for field in fields(part)]
    numbers = (getattr(part, name, None) for name in ("entries", "share"))
    found = (each for each in (*numbers, *map(_stated, values)) if isinstance(each, int | float))
    return next(found, None)


@cache
def brief(policy: Policy) -> str:
    """Describes a policy in a few words: by its preset and budget if these say all, and else by its parts."""
    budget = _stated(policy.budget)
    for name, make in PRESETS.items():
        given: tuple[dict[str, Any], ...] = ({}, {"budget": budget})
        for options in given:
            with suppress(ValueError, TypeError, OSError):  # of presets that need other options
                if make(**options) == policy:
                    return f"{name}:budget={budget}" if options else name
    return f"{type(policy.score).__name__}, {policy.budget}"
