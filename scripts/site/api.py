"""The directives of mkdocstrings on the pages of docs/api: `::: NAME`, or `::: MODULE` for all names of a module.

mkdocstrings reads the code without importing it. It misses a function whose module has its name, and an operation that
is made by a call. For these the directive gets the address of the function, and a heading.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from inspect import unwrap
from types import ModuleType
from typing import Any


def directives(markdown: str) -> str:
    """A page on which each directive is one of mkdocstrings, for one name."""
    return re.sub(
        r"^::: (kvjax[\w.]*)$", lambda found: "\n\n".join(map(_directive, _names(found[1]))), markdown, flags=re.M
    )


def documented(markdown: str) -> list[str]:
    """The names that the directives of a page stand for."""
    return [name for found in re.findall(r"^::: (kvjax[\w.]*)$", markdown, re.M) for name in _names(found)]


def _names(name: str) -> list[str]:
    """The public names of a module; any other name as it is."""
    value = _value(name)
    return [f"{name}.{each}" for each in value.__all__] if isinstance(value, ModuleType) else [name]


def _value(name: str) -> Any:
    """What a dotted name stands for: an attribute before a module of the same name."""
    owner, _, last = name.rpartition(".")
    return getattr(_value(owner), last) if owner and hasattr(_value(owner), last) else import_module(name)


def _directive(name: str) -> str:
    value = unwrap(_value(name))
    address = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    hidden = name in sys.modules or address.endswith(f".reference.{name.rpartition('.')[2]}")
    if not hidden:
        return f"::: {name}"
    return f"::: {address}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}"
