"""Presets of other packages: what an entry point may name, and the parts that come with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from kvjax.methods import registry
from kvjax.methods.registry import _parts_of, _preset_of, preset
from kvjax.policies import full, snapkv
from kvjax.policy import Policy, Protect, TopTokens


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Another package's module: a preset, a part of its own, and a part and a preset that it imports from kvjax."""
    module = ModuleType("others")
    monkeypatch.setattr(registry, "_presets", set(registry._presets))
    monkeypatch.setitem(sys.modules, "others", module)

    def everything() -> Policy:
        return full()

    @dataclass(frozen=True)
    class Others(TopTokens):
        """Selects as TopTokens does."""

    for value in (everything, Others):
        value.__module__ = "others"
    vars(module).update(everything=preset(everything), Others=Others, Protect=Protect, snapkv=snapkv, number=3)
    return module


def test_a_module_s_preset_and_parts(others: ModuleType) -> None:
    assert _preset_of("everything", others.everything) == {"everything": others.everything}
    assert _parts_of("everything", others.everything) == {"Others": others.Others}


def test_what_is_no_preset_of_that_name_is_refused(others: ModuleType) -> None:
    for name, value in (("all", others.everything), ("full", lambda: full()), ("number", others.number)):
        with pytest.raises(ValueError, match=rf"expected a function {name}, decorated with kvjax\.parts\.preset"):
            _preset_of(name, value)
