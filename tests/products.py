"""Products of options of which a run tries a part, unless it tries all."""

from collections.abc import Iterable
from itertools import cycle, islice, product
from typing import Any

import pytest


def part(product: Iterable[Any], chosen: Iterable[Any], gates: Iterable[Any] = ()) -> list[Any]:
    """The parameters of a test: those that are not chosen are marked exhaustive, and gates are marked so.

    All that are chosen must be there, and all gates must be chosen.
    """
    product, chosen, gates = list(product), list(chosen), list(gates)
    missing = [case for case in chosen if case not in product] + [case for case in gates if case not in chosen]
    assert not missing, missing

    def values(case: Any) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    def marks(case: Any) -> list[pytest.MarkDecorator]:
        return [pytest.mark.gate] * (case in gates) + [pytest.mark.exhaustive] * (case not in chosen)

    return [pytest.param(*values(case), marks=marks(case)) for case in product]


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """The parameters of a test of a product, of which those are chosen that together try each option of each axis.

    The i-th chosen case has the i-th option of each axis, and a shorter axis begins anew. An option that is a tuple
    stands for several parameters.
    """
    options = [list(axis) for axis in axes]

    def flat(case: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(x for option in case for x in (option if isinstance(option, tuple) else (option,)))

    chosen = islice(zip(*map(cycle, options), strict=False), max(map(len, options)))
    return part(map(flat, product(*options)), map(flat, chosen))
