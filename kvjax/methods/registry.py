"""The presets and the parts by name: those in the modules of methods, and those of packages with entry points."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection
from functools import cache, reduce, wraps
from typing import Any, TypeVar, cast

import numpy as np

from kvjax.models import Registered
from kvjax.policy import Part, Policy, named

Preset = TypeVar("Preset", bound=Callable[..., Policy])

_presets: set[Callable[..., Policy]] = set()  # all functions that the decorator has returned


def preset(build: Preset) -> Preset:
    """Makes a function the preset of its name.

    NumPy's numbers become Python's, whose repr is a literal. Its errors begin with its name, instead of the names of
    parts and presets that its module knows, and are in the words of its options.
    """
    words = _words(inspect.signature(build).parameters)

    @wraps(build)
    def called(*values: Any, **given: Any) -> Policy:
        try:
            with named(build.__name__, instead_of=build.__globals__):
                return build(*map(_plain, values), **{name: _plain(value) for name, value in given.items()})
        except ValueError as error:
            error.args = (reduce(lambda text, pair: text.replace(*pair), words, str(error)),)
            raise

    _presets.add(called)
    return cast(Preset, called)


def _words(options: Collection[str]) -> list[tuple[str, str]]:
    """Returns replacements in messages for fields of a policy that a preset lacks or has under another name."""
    words = [(" recent=", " window=")] if "window" in options and "recent" not in options else []
    if "tokens" in options:
        words.append((" learned=", " tokens="))
    return words if "every" in options else [*words, (" + every=", " + ")]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _of_methods(fits: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the values that the modules of methods define and that fit, in alphabetical order of their names."""
    package = importlib.import_module(__package__)
    names = (module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    modules = map(importlib.import_module, names)
    found = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if fits(value) and value.__module__ == module.__name__
    }
    return dict(sorted(found.items()))


def _is_preset(value: Any) -> bool:
    return inspect.isfunction(value) and value in _presets


def _is_part(value: Any) -> bool:
    """Returns whether a value is a part, and no base class of several parts."""
    if not (inspect.isclass(value) and issubclass(value, Part)):
        return False
    return not any(getattr(getattr(value, name), "__isabstractmethod__", False) for name in dir(value))


def _preset_of(name: str, build: Callable[..., Policy]) -> dict[str, Callable[..., Policy]]:
    """Returns a package's preset; raises ValueError for anything else."""
    if not _is_preset(build) or build.__name__ != name:
        raise ValueError(f"expected a function {name}, decorated with kvjax.parts.preset")
    return {name: build}


def _parts_of(name: str, build: Callable[..., Policy]) -> dict[str, type[Part]]:
    """Returns the parts in the module of a package's preset, without those of kvjax."""
    build = _preset_of(name, build)[name]
    found = vars(sys.modules[build.__module__]).values()
    return {part.__name__: part for part in found if _is_part(part) and not part.__module__.startswith("kvjax.")}


@cache
def presets() -> Registered[Callable[..., Policy]]:
    """Returns all presets by name."""
    return Registered("kvjax.presets", _of_methods(_is_preset), _preset_of)


@cache
def parts() -> Registered[type[Part]]:
    """Returns all parts by class name."""
    return Registered("kvjax.presets", _of_methods(_is_part), _parts_of)
