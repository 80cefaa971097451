"""The building blocks of policies, one concern each. A preset in `kvjax.policies` is a composition of them."""

from .budget import DenseLayers, Everything, Fixed, Fraction, budget_of
from .merge import Drop
from .score import AccumulatedAttention, LastAttention, Pool, Recency, WindowAttention, WindowWeights
from .select import TopTokens

__all__ = [
    "AccumulatedAttention",
    "DenseLayers",
    "Drop",
    "Everything",
    "Fixed",
    "Fraction",
    "LastAttention",
    "Pool",
    "Recency",
    "TopTokens",
    "WindowAttention",
    "WindowWeights",
    "budget_of",
]
