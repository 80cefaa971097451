"""The language of policies: the interfaces of parts, and the policy that combines them. It knows no method."""

from .budget import AllocatedBudget, Budget, Layout, check_alike, most_entries
from .learned import LearnedTokens
from .merge import Drop, Effects, Keep, Merge
from .part import Part, check_choice, check_integer, check_kind, check_number, named
from .passes import Pass, Replay, Texts
from .policy import Limits, Policy, Protect
from .score import Attended, LayerShape, Moment, Needs, Received, Score, ScoreWrapper
from .select import Ranked, Select, SelectWrapper, TopTokens
from .shares import check_share_of, ratio_of, share_of
from .storage import PLAIN, Storage
from .together import MergesLater, Together

__all__ = [
    "PLAIN",
    "AllocatedBudget",
    "Attended",
    "Budget",
    "Drop",
    "Effects",
    "Keep",
    "LayerShape",
    "Layout",
    "LearnedTokens",
    "Limits",
    "Merge",
    "MergesLater",
    "Moment",
    "Needs",
    "Part",
    "Pass",
    "Policy",
    "Protect",
    "Ranked",
    "Received",
    "Replay",
    "Score",
    "ScoreWrapper",
    "Select",
    "SelectWrapper",
    "Storage",
    "Texts",
    "Together",
    "TopTokens",
    "check_alike",
    "check_choice",
    "check_integer",
    "check_kind",
    "check_number",
    "check_share_of",
    "most_entries",
    "named",
    "ratio_of",
    "share_of",
]
