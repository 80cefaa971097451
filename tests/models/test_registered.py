"""Things by name, to which packages add theirs: what is taken, what fails, and that nothing is imported too early."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvjax.models import Registered
from kvjax.models import registered as module


class Package:
    """What a distribution says of itself."""

    def __init__(self, name: str):
        self.name, self.version = name, "2.0"


def point(name: str, package: str, value: object, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """An entry point that leads to a value, or raises it."""
    made = EntryPoint(name, f"{package}:{name}", "kvjax.things")
    vars(made)["dist"] = Package(package)

    def load(self):
        found = values[self.value]
        if isinstance(found, BaseException):
            raise found
        return found

    values[made.value] = value
    monkeypatch.setattr(EntryPoint, "load", load)
    return made


values: dict[str, object] = {}


def test_names_that_are_taken_and_packages_that_fail(monkeypatch) -> None:
    points = [
        point("same", "b", 2, monkeypatch),
        point("same", "a", 1, monkeypatch),
        point("good", "a", 3, monkeypatch),
        point("ours", "c", 4, monkeypatch),
        point("bad", "b", ImportError("no such\nlibrary"), monkeypatch),
        point("wrong", "c", "text", monkeypatch),
    ]
    asked = []

    def entry_points(group: str):
        asked.append(group)
        return points

    monkeypatch.setattr(module, "entry_points", entry_points)

    def numbers(name, value):
        if not isinstance(value, int):
            raise ValueError("expected a number")
        return {name: value}

    things = Registered("kvjax.things", {"ours": 0}, numbers)
    assert things["ours"] == 0
    assert "ours" in things
    assert asked == []
    with pytest.warns(UserWarning, match="is left out") as caught:
        assert dict(things) == {"ours": 0, "same": 1, "good": 3}
    assert [str(warning.message) for warning in caught] == [
        "'bad' in kvjax.things of the package b 2.0 is left out: ImportError: no such library",
        "'same' in kvjax.things of the package b 2.0 is left out: a 2.0 has that name",
        "'ours' in kvjax.things of the package c 2.0 is left out: kvjax has that name",
        "'wrong' in kvjax.things of the package c 2.0 is left out: ValueError: expected a number",
    ]
    assert "bad" not in things
    assert len(things) == 3
    assert asked == ["kvjax.things"]
