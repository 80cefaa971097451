"""The building blocks of policies, one concern each. A preset in `kvjax.policies` is a composition of them."""

from .adaptive import AdaptiveShares
from .budget import DenseLayers, Everything, Fixed, Fraction, budget_of
from .cam import ValueMerge, WatchedRecency
from .chunks import Chunks, EvenChunks
from .composite import TaskAttention
from .crush import Representatives
from .dynamic import DynamicShares
from .expected import ExpectedAttention
from .gates import GatedShares
from .gaussian_merge import GaussianMerge
from .keys import KeyDifference, KeyNorm, RandomDraw
from .lag import LagDifference
from .merge import Drop
from .noisy import NoisyAttention
from .persistence import Neglect
from .projected import ProjectedValues
from .pyramid import Pyramid
from .reconstruct import Reconstruction
from .score import AccumulatedAttention, FoldedWindow, LastAttention, Pool, Recency, WindowAttention
from .select import TopTokens
from .shared import CompositeShares, GlobalShares, UniformShares
from .similar import SimilarityMerge, ThresholdAttention
from .storage import Quantized
from .variance import VarianceShares

__all__ = [
    "AccumulatedAttention",
    "AdaptiveShares",
    "Chunks",
    "CompositeShares",
    "DenseLayers",
    "Drop",
    "DynamicShares",
    "EvenChunks",
    "Everything",
    "ExpectedAttention",
    "Fixed",
    "FoldedWindow",
    "Fraction",
    "GatedShares",
    "GaussianMerge",
    "GlobalShares",
    "KeyDifference",
    "KeyNorm",
    "LagDifference",
    "LastAttention",
    "Neglect",
    "NoisyAttention",
    "Pool",
    "ProjectedValues",
    "Pyramid",
    "Quantized",
    "RandomDraw",
    "Recency",
    "Reconstruction",
    "Representatives",
    "SimilarityMerge",
    "TaskAttention",
    "ThresholdAttention",
    "TopTokens",
    "UniformShares",
    "ValueMerge",
    "VarianceShares",
    "WatchedRecency",
    "WindowAttention",
    "budget_of",
]
