"""Layers of a kind have equally many slots while they are read, so that they share a program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from kvjax.attend import ReadPlan
from kvjax.cache import Entries, Layers
from kvjax.policy import Policy
from kvjax.runtime.clock import Run


@dataclass(frozen=True)
class Widths:
    """The slots of each layer around a call that reads tokens.

    Attributes:
        wide: the plan of the call.
        before: the slots that the call takes.
        own: the slots that the layers have in the end. None where they keep those of the call.
    """

    wide: ReadPlan
    before: tuple[int, ...]
    own: tuple[int, ...] | None = None

    @classmethod
    def of(cls, policy: Policy, entries: Entries, plan: ReadPlan, facts: Sequence[Hashable]) -> Widths:
        """Gives all layers of a kind the slots of the largest, unless what is retained depends on their number.

        Args:
            entries: before the call.
            plan: of the call.
            facts: of each layer. Layers of a kind have equal ones.
        """
        compresses = any(most is not None for most in plan.kept)
        if entries.preallocates or plan.settled or (compresses and not policy.ignores_size):
            return cls(plan, entries.bounds)
        kinds = list(zip(facts, *policy.limits(len(entries)), (most is None for most in plan.kept), strict=True))
        most = zip(plan.kept, _largest([n or 0 for n in plan.kept], kinds), strict=True)
        kept = tuple(None if n is None else largest for n, largest in most)
        wide = replace(plan, slots=_largest(plan.slots, kinds), kept=kept)
        return cls(wide, _largest(entries.bounds, kinds), plan.slots)

    def widen(self, part: Entries, some: slice, run: Run) -> Entries:
        """Returns the entries of some layers as the call takes them."""
        return _in_slots(part, self.before[some], run)

    def narrow(self, part: Entries, some: slice, run: Run) -> Entries:
        """Returns the entries of some layers in their own slots, after the call."""
        return part if self.own is None else _in_slots(part, self.own[some], run)


def _in_slots(part: Entries, slots: tuple[int, ...], run: Run) -> Entries:
    return part if part.bounds == slots else run(resized, part, slots=slots)


def _largest(numbers: Sequence[int], kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Returns for each layer the largest number of its kind."""
    most: dict[Hashable, int] = {}
    for kind, number in zip(kinds, numbers, strict=True):
        most[kind] = max(number, most.get(kind, number))
    return tuple(most[kind] for kind in kinds)


@partial(jax.jit, static_argnames="slots")
def resized(layers: Layers, *, slots: tuple[int, ...]) -> Layers:
    """Returns layers in other numbers of slots: empty ones are added behind the others, or taken from there."""
    pairs = zip(layers, slots, strict=True)
    return Layers(tuple(layer.trim(most) if most < layer.slots else layer.grow(most) for layer, most in pairs))
