"""The one list of methods: presets by name, filled by a decorator, and the parts that methods define."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from kvjax.policy import Part, Policy

Preset = TypeVar("Preset", bound=Callable[..., Policy])

_presets: dict[str, Callable[..., Policy]] = {}


def preset(build: Preset) -> Preset:
    """Registers a preset under the name of its function. NumPy's numbers become Python's, whose repr is a literal."""

    @functools.wraps(build)
    def of_plain_numbers(*values: Any, **options: Any) -> Policy:
        return build(*map(_plain, values), **{name: _plain(value) for name, value in options.items()})

    _presets[build.__name__] = of_plain_numbers
    return cast(Preset, of_plain_numbers)


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
