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

DIRECTIVE = re.compile(r"^::: (kvjax[\w.]*)$", re.MULTILINE)


def directives(markdown: str) -> str:
    """A page on which each directive is one of mkdocstrings, for one name."""
    return DIRECTIVE.sub(lambda found: "\n\n".join(map(_directive, _names(found[1]))), markdown)


def documented(markdown: str) -> list[str]:
    """The names that the directives of a page stand for."""
    return [name for found in DIRECTIVE.findall(markdown) for name in _names(found)]


def address(name: str) -> str:
    """Returns where mkdocstrings finds a name, which is also the anchor of its heading."""
    value = unwrap(_value(name))
    defined = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    hidden = name in sys.modules or defined.endswith(f".reference.{_last(name)}")
    return defined if hidden else name


def _directive(name: str) -> str:
    if address(name) == name:
        return f"::: {name}"
    return f"::: {address(name)}\n    options:\n      heading: {name}\n      toc_label: {_last(name)}"


def _names(name: str) -> list[str]:
    """The public names of a module; any other name as it is."""
    value = _value(name)
    if not isinstance(value, ModuleType):
        return [name]
    own = [
        each
        for each, x in vars(value).items()
        if each[0] != "_" and callable(x) and getattr(x, "__module__", "") == value.__name__
    ]
    return [f"{name}.{each}" for each in getattr(value, "__all__", own)]


def _value(name: str) -> Any:
    """Returns what a dotted name stands for: an attribute before a module of the same name."""
    owner = name.rpartition(".")[0]
    return getattr(_value(owner), _last(name)) if owner and hasattr(_value(owner), _last(name)) else import_module(name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
