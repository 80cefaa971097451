"""What a method outside of kvjax can import: all that the methods within it use."""

from __future__ import annotations

import ast
from pathlib import Path

import kvjax
from kvjax import parts
from kvjax.methods import registry

METHODS = Path(__file__).resolve().parents[1] / "kvjax" / "methods"
# Helpers of one family of methods, whose parts a method of the same family would subclass or call.
FAMILIES = {"head_numbers", "learned", "query_sample", "repetition", "settling"}
# What storages, trained networks, files of numbers and passes that run backwards are made of in kvjax itself.
INTERNAL = {
    "read_text",
    "Entries",
    "densely",
    "of_layer",
    "slot_attention",
    "CheckpointError",
    "FORMS",
    "QuantizedArray",
    "read_gates",
}


def imported() -> dict[str, set[str]]:
    """What methods import from elsewhere in kvjax or from `common`, and the modules that do so."""
    found: dict[str, set[str]] = {}
    for path in set(METHODS.rglob("*.py")) - {METHODS / "registry.py"}:
        within_common = path.parent.name == "common"
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            elsewhere = node.module.startswith("kvjax.") and not node.module.startswith("kvjax.methods")
            first, _, module = node.module.partition(".")
            common = node.level > 0 and first == "common" and not within_common and module not in FAMILIES
            if elsewhere or common:
                for alias in node.names:
                    found.setdefault(alias.name, set()).add(path.name)
    return found


def test_everything_that_methods_use_can_be_imported_from_outside():
    found = imported()
    assert {"visible", "capped", "QueryRing", "check_window", "redundancy", "set_entries"} <= found.keys()
    missing = {
        name: users
        for name, users in found.items()
        if name not in {*kvjax.__all__, *parts.__all__, *registry.parts().own, *INTERNAL}
    }
    assert not missing, f"kvjax.parts does not export {missing}"
    assert "preset" in parts.__all__


def test_exceptions_are_used():
    assert imported().keys() >= INTERNAL


def test_all_names_are_there():
    for name in parts.__all__:
        assert hasattr(parts, name)
    assert not hasattr(parts, "__no_such_name__")
    assert not hasattr(parts, "NoSuchPart")
    assert {"KeyNorm", "budget_of"} <= set(dir(parts))
