"""Products of options of which a run tries a part, unless it tries all."""

from collections.abc import Iterable
from typing import Any

import pytest


def part(product: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """The parameters of a test: those that are not chosen are marked exhaustive. All that are chosen must be there."""
    product, chosen = list(product), list(chosen)
    missing = [case for case in chosen if case not in product]
    assert not missing, missing

    def values(case: Any) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    return [pytest.param(*values(x), marks=[] if x in chosen else pytest.mark.exhaustive) for x in product]
