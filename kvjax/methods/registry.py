"""The one list of methods: presets by name, filled by a decorator, and the parts that methods define."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from kvjax.policy import Part, Policy, named

Preset = TypeVar("Preset", bound=Callable[..., Policy])

_presets: dict[str, Callable[..., Policy]] = {}


def preset(build: Preset) -> Preset:
    """Registers a preset under the name of its function.

    NumPy's numbers become Python's, whose repr is a literal. Its errors begin with its name, instead of the names of
    parts and presets that its module knows, and are in the words of its options.
    """
    words = _words(inspect.signature(build).parameters)

    @functools.wraps(build)
    def called(*values: Any, **given: Any) -> Policy:
        try:
            with named(build.__name__, instead_of=build.__globals__):
                return build(*map(_plain, values), **{name: _plain(value) for name, value in given.items()})
        except ValueError as error:
            error.args = (functools.reduce(lambda text, pair: text.replace(*pair), words, str(error)),)
            raise

    _presets[build.__name__] = called
    return cast(Preset, called)


def _words(options: Collection[str]) -> list[tuple[str, str]]:
    """What messages say for fields of a policy that a preset has no option for, or has under another name."""
    words = [(" recent=", " window=")] if "window" in options and "recent" not in options else []
    return words if "every" in options else [*words, (" + every=", " + ")]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def presets() -> dict[str, Callable[..., Policy]]:
    """All presets by name, in alphabetical order."""
    _modules()
    return dict(sorted(_presets.items()))


def parts() -> dict[str, type[Part]]:
    """All parts that methods define, by class name, in alphabetical order; no base classes of several of them."""
    found = {
        name: value
        for module in _modules()
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Part) and value.__module__ == module.__name__
        if not _lacks_methods(value)
    }
    return dict(sorted(found.items()))


def _lacks_methods(part: type[Part]) -> bool:
    return any(getattr(getattr(part, name), "__isabstractmethod__", False) for name in dir(part))


def _modules() -> list[ModuleType]:
    """Every module of this package."""
    package = importlib.import_module(__package__)
    names = (module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    return [importlib.import_module(name) for name in names]
