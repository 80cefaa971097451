"""Things by name, to which installed packages add theirs by entry points."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

Thing = TypeVar("Thing")


class Registered(Mapping[str, Thing]):
    """Things by name: our own, and those that installed packages register in a group of entry points.

    Packages are imported when a name is asked for that is not our own, or all names are; not before. One that fails, or
    that has a name which is taken, is named by a warning. It loses what fails, and all others stay as they are.

    Attributes:
        group: of entry points, such as "kvjax.presets".
        own: our own things by name.
        things: (name of an entry point, the object that it leads to) -> things by name. It raises ValueError for an
            object of another kind.
    """

    def __init__(self, group: str, own: Mapping[str, Thing], things: Callable[[str, Any], Mapping[str, Thing]]):
        self.group, self.own, self.things = group, dict(own), things

    @cached_property
    def outside(self) -> dict[str, Thing]:
        """Returns what installed packages have registered."""
        found: dict[str, Thing] = {}
        owner = dict.fromkeys(self.own, "kvjax")
        for package, point in sorted((_package(point), point) for point in entry_points(group=self.group)):
            try:
                things = self.things(point.name, point.load())
            except Exception as error:  # a package may fail in any way
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                warnings.warn(
                    f"{point.name!r} in {self.group} of the package {package} is left out: {reason}", stacklevel=1
                )
                continue
            for name, thing in things.items():
                if name not in owner:
                    owner[name], found[name] = package, thing
                elif found.get(name) is not thing:
                    warnings.warn(
                        f"{name!r} in {self.group} of the package {package} is left out: {owner[name]} has that name",
                        stacklevel=1,
                    )
        return found

    def __getitem__(self, name: str) -> Thing:
        return self.own[name] if name in self.own else self.outside[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.outside

    def __len__(self) -> int:
        return len(self.own) + len(self.outside)


def _package(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
