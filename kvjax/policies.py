"""The presets: each method with the defaults of its paper. `PRESETS` has them by name.

A preset is a function that returns a `Policy`, such as `kvjax.policies.snapkv(budget=1024)`. Installed packages add
theirs by entry points in `kvjax.presets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
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
    if not isinstance(description, str):
        raise ValueError(f"description is of type {type(description).__name__}: expected a text")
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


def size_of(policy: Policy) -> int | float | None:
    """The budget of a policy's mean kv head: a number of entries, or a share of the prompt; None if it has neither."""
    shared = policy.budget
    while (inner := getattr(shared, "budget", None)) is not None:
        shared = inner
    return getattr(shared, "entries", getattr(shared, "share", None))


@cache
def brief(policy: Policy) -> str:
    """A few words for a policy: the text of a preset with at most a budget if there is one, and else two of its parts.

    The budget is that of the mean kv head, if heads or layers share one.
    """
    size = size_of(policy)
    for name, make in PRESETS.items():
        given: tuple[dict[str, Any], ...] = ({}, {"budget": size})
        for options in given:
            with suppress(ValueError, TypeError, OSError):  # of presets that need other options
                if make(**options) == policy:
                    return f"{name}:budget={size}" if options else name
    parts = f"{type(policy.score).__name__}, {type(policy.budget).__name__}"
    return parts if size is None else f"{parts} of {size}"
