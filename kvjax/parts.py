"""The parts that policies are composed of, and what a part of one's own needs.

Every part that a method defines is here under its class name: `kvjax.parts.WindowAttention`. The base classes of parts
are in `kvjax` itself. A saved cache names its parts as they are named here.
"""

from __future__ import annotations

from typing import Any

from kvjax.cache import UNLIMITED, Slots, mark
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.methods import registry
from kvjax.methods.common.budgets import budget_of
from kvjax.pallas_kernels import Asked, Reduction, compact, top_counts, top_tokens, window_scores
from kvjax.policy import (
    Attended,
    Effects,
    LayerShape,
    Layout,
    Moment,
    Needs,
    Pass,
    Protect,
    Ranked,
    Received,
    Replay,
    ScoreWrapper,
    SelectWrapper,
    check_choice,
    check_integer,
    check_kind,
    check_number,
)

_PARTS = registry.parts()

__all__ = [
    "ALL_HEADS",
    "UNLIMITED",
    "Asked",
    "Attended",
    "Effects",
    "Heads",
    "LayerShape",
    "Layout",
    "Moment",
    "Needs",
    "Pass",
    "Protect",
    "Ranked",
    "Received",
    "Reduction",
    "Replay",
    "ScoreWrapper",
    "SelectWrapper",
    "Slots",
    "budget_of",
    "check_choice",
    "check_integer",
    "check_kind",
    "check_number",
    "compact",
    "mark",
    "top_counts",
    "top_tokens",
    "window_scores",
]


def __getattr__(name: str) -> Any:
    try:
        return _PARTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no part {name!r}; there are {', '.join(_PARTS)}") from None


def __dir__() -> list[str]:
    return [*__all__, *_PARTS]
