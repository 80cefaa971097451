"""The directives of mkdocstrings on the pages of docs/api: `::: NAME`, or `::: MODULE` for all names of a module.

mkdocstrings reads the code without importing it. It misses a function whose module has its name, an operation that is
made by a call, and a name that a module finds when it is asked. For these the directive gets the address of the
definition, and a heading.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from inspect import unwrap
from types import ModuleType
from typing import Any

from kvjax import parts
from kvjax.methods import registry

DIRECTIVE = re.compile(r"^::: (kvjax[\w.]*)$", re.MULTILINE)


def directives(markdown: str) -> str:
    """A page on which each directive is one of mkdocstrings, for one name."""
    return DIRECTIVE.sub(lambda found: "\n\n".join(map(_directive, _names(found[1]))), markdown)


def documented(markdown: str) -> list[str]:
    """The names that the directives of a page stand for."""
    return [name for found in DIRECTIVE.findall(markdown) for name in _names(found)]


def parts_of_methods() -> str:
    """The page of the parts that methods define, which `kvjax.parts` has by name."""
    names = [f"kvjax.parts.{name}" for name in registry.parts() if name not in parts.__all__]
    directives = [_directive(name, "      members: false") for name in names]
    return "\n\n".join(
        ("# Parts of methods", "Each of these parts of a method can be part of any policy.", *directives)
    )


def address(name: str) -> str:
    """Returns where mkdocstrings finds a name, which is also the anchor of its heading."""
    if (value := unwrap(_value(name))) is None:
        return name
    defined = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    owner = _value(name.rpartition(".")[0])
    hidden = name in sys.modules or _last(name) not in vars(owner) or defined.endswith(f".reference.{_last(name)}")
    return defined if hidden else name


def _directive(name: str, *options: str) -> str:
    if address(name) == name:
        return f"::: {name}"
    return "\n".join(
        (f"::: {address(name)}", "    options:", f"      heading: {name}", f"      toc_label: {_last(name)}", *options)
    )


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
    """Returns what a dotted name stands for: an attribute before a module of the same name.

    It is None if its module needs a package that is not installed. mkdocstrings reads the source in any case.
    """
    owner = name.rpartition(".")[0]
    if owner and hasattr(_value(owner), _last(name)):
        return getattr(_value(owner), _last(name))
    try:
        return import_module(name)
    except ImportError:
        return None


def _last(name: str) -> str:
    return name.rpartition(".")[2]
