"""The parts that policies are composed of, and all that a method of one's own needs.

Every part that a method defines is here under its class name: `kvjax.parts.WindowAttention`, and so are the parts of
packages that add presets. The base classes of parts are in `kvjax` itself. A saved cache names its parts as they are
named here.
"""

from __future__ import annotations

from typing import Any

from kvjax.cache import UNLIMITED, Slots, mark
from kvjax.checks import check_truth, is_finite, is_number, path_of, shown
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.methods import registry
from kvjax.methods.common import group_weights, nearest, query_bits
from kvjax.methods.common.allocation import check_limited, check_mean, check_share, raise_best, scaled
from kvjax.methods.common.budgets import budget_of
from kvjax.methods.common.in_place import changed_if
from kvjax.methods.common.in_turns import in_turns
from kvjax.methods.common.levels import budget_of_level
from kvjax.methods.common.mean_rotation import mean_rotation
from kvjax.methods.common.projected_norms import projected_norms
from kvjax.methods.common.redundancy import redundancy, softmax
from kvjax.methods.common.refusals import (
    check_by_entry,
    check_first_rotation,
    check_in_order,
    check_own_positions,
    check_plain_budget,
    check_prompts_only,
    check_sinks,
    check_window,
)
from kvjax.methods.common.replayed import ReplayedScore
from kvjax.methods.common.window_attention import QueryRing, QueryWindow
from kvjax.methods.registry import preset
from kvjax.models import AttentionLayer, join_sinks, rotate
from kvjax.pallas_kernels import (
    Asked,
    Reduction,
    capped,
    change_block,
    compact,
    dot_products,
    finite_or_zero,
    fold,
    lowest_tokens,
    mapped,
    prompt_attention,
    set_entries,
    top_counts,
    top_tokens,
    traced_once,
    weighted_sum,
    window_scores,
)
from kvjax.pallas_kernels.arrays import by_member, pad
from kvjax.pallas_kernels.matrices import cholesky, eigh, solve_lower, solve_positive
from kvjax.pallas_kernels.visibility import span, visible, visible_tiles
from kvjax.policy import (
    PLAIN,
    Attended,
    Drop,
    Effects,
    Keep,
    LayerShape,
    Layout,
    LearnedTokens,
    Moment,
    Needs,
    Part,
    Pass,
    Protect,
    Ranked,
    Received,
    Replay,
    ScoreWrapper,
    SelectWrapper,
    Texts,
    TopTokens,
    check_alike,
    check_choice,
    check_integer,
    check_kind,
    check_number,
    check_share_of,
    most_entries,
    ratio_of,
    share_of,
)

__all__ = [
    "ALL_HEADS",
    "PLAIN",
    "UNLIMITED",
    "Asked",
    "Attended",
    "AttentionLayer",
    "Drop",
    "Effects",
    "Heads",
    "Keep",
    "LayerShape",
    "Layout",
    "LearnedTokens",
    "Moment",
    "Needs",
    "Part",
    "Pass",
    "Protect",
    "QueryRing",
    "QueryWindow",
    "Ranked",
    "Received",
    "Reduction",
    "Replay",
    "ReplayedScore",
    "ScoreWrapper",
    "SelectWrapper",
    "Slots",
    "Texts",
    "TopTokens",
    "budget_of",
    "budget_of_level",
    "by_member",
    "capped",
    "change_block",
    "changed_if",
    "check_alike",
    "check_by_entry",
    "check_choice",
    "check_first_rotation",
    "check_in_order",
    "check_integer",
    "check_kind",
    "check_limited",
    "check_mean",
    "check_number",
    "check_own_positions",
    "check_plain_budget",
    "check_prompts_only",
    "check_share",
    "check_share_of",
    "check_sinks",
    "check_truth",
    "check_window",
    "cholesky",
    "compact",
    "dot_products",
    "eigh",
    "finite_or_zero",
    "fold",
    "group_weights",
    "in_turns",
    "is_finite",
    "is_number",
    "join_sinks",
    "lowest_tokens",
    "mapped",
    "mark",
    "mean_rotation",
    "most_entries",
    "nearest",
    "pad",
    "path_of",
    "preset",
    "projected_norms",
    "prompt_attention",
    "query_bits",
    "raise_best",
    "ratio_of",
    "redundancy",
    "rotate",
    "scaled",
    "set_entries",
    "share_of",
    "shown",
    "softmax",
    "solve_lower",
    "solve_positive",
    "span",
    "top_counts",
    "top_tokens",
    "traced_once",
    "visible",
    "visible_tiles",
    "weighted_sum",
    "window_scores",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python asks for such names, as it imports
        raise AttributeError(name)
    parts = registry.parts()
    try:
        return parts[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no part {name!r}; there are {', '.join(parts)}") from None


def __dir__() -> list[str]:
    return [*__all__, *registry.parts()]
