"""The selection and the merge that each score tries in `test_composition.py`."""

from __future__ import annotations

from kvjax.methods.common.replayed import ReplayedScore
from kvjax.parts import (
    AccumulatedAttention,
    AttentionClasses,
    Attribution,
    BlockByBlock,
    Chunks,
    DistancePreference,
    EvenChunks,
    ExpectedAttention,
    FoldedWindow,
    GlobalAttention,
    JointImportance,
    KeyDifference,
    KeyNorm,
    Ladder,
    LagDifference,
    LastAttention,
    LazyAttention,
    LearnedScore,
    LeveragedAttention,
    LeverageScore,
    Neglect,
    Newest,
    NoisyAttention,
    NonCausalAttention,
    ObservedAttention,
    Pages,
    ProjectedValues,
    QueryFilter,
    QueryHeadAttention,
    QuerySample,
    RandomDraw,
    Recency,
    Reconstruction,
    RecurrenceInterval,
    Representatives,
    RobustAttention,
    SavedExpectedAttention,
    SquaredNorms,
    StochasticAttention,
    TaskAttention,
    TopTokens,
    ValueCapacity,
    Votes,
    WindowAttention,
)
from kvjax.policy import Merge, Score, Select
from tests.policy.compositions import MERGES, OF_METHODS, QUERY_BITS, SELECTS

REPRESENTATIVES, CHUNKS, EVEN, PAGES = (
    next(select for select in SELECTS if type(select) is kind) for kind in (Representatives, Chunks, EvenChunks, Pages)
)
DROP, VALUES, GAUSSIAN, SIMILAR, NEAREST = MERGES
# The selection and the merge that each score tries, with all rhythms that it can have: on budgets that are not
# allocated, then on allocated ones. A program serves all scores, so that one of each kind of them tries a pair. Window
# scores have no rhythm under a merge, so that they try merges of prompts. The default run tries the first three scores.
TRIED: dict[type[Score], list[list[tuple[Select, Merge]]]] = {
    Recency: [[(REPRESENTATIVES, DROP)], [(EVEN, DROP)]],
    RandomDraw: [[(PAGES, SIMILAR)], [(Newest(), SIMILAR)]],
    KeyNorm: [[(CHUNKS, DROP)], [(TopTokens(), NEAREST)]],
    KeyDifference: [[(Newest(), SIMILAR)], [(Newest(), DROP)]],
    LeverageScore: [[(Newest(), DROP)], [(EVEN, SIMILAR)]],
    LagDifference: [[(EVEN, DROP)], [(REPRESENTATIVES, DROP)]],
    ExpectedAttention: [[(TopTokens(), DROP)], [(CHUNKS, DROP)]],
    AccumulatedAttention: [[(Newest(), VALUES)], [(TopTokens(), VALUES)]],
    QueryHeadAttention: [[(QUERY_BITS, DROP), (QUERY_BITS, GAUSSIAN)]] * 2,
    NoisyAttention: [[(TopTokens(), VALUES)], [(Newest(), VALUES)]],
    Neglect: [[(EVEN, SIMILAR)], [(PAGES, DROP)]],
    LastAttention: [[(TopTokens(), DROP)], [(Newest(), DROP)]],
    WindowAttention: [[(TopTokens(), GAUSSIAN)], [(CHUNKS, GAUSSIAN)]],
    FoldedWindow: [[(PAGES, SIMILAR)], [(REPRESENTATIVES, SIMILAR)]],
    JointImportance: [[(CHUNKS, GAUSSIAN)], [(PAGES, SIMILAR)]],
    ProjectedValues: [[(EVEN, DROP)], [(TopTokens(), DROP)]],
    ObservedAttention: [[(TopTokens(), DROP)], [(CHUNKS, DROP)]],
    SquaredNorms: [[(EVEN, NEAREST)], [(TopTokens(), DROP)]],
    ValueCapacity: [[(REPRESENTATIVES, DROP)], [(EVEN, DROP)]],
    NonCausalAttention: [[(TopTokens(), GAUSSIAN)], [(REPRESENTATIVES, DROP)]],
    LeveragedAttention: [[(PAGES, DROP)], [(CHUNKS, GAUSSIAN)]],
    QuerySample: [[(TopTokens(), VALUES)], [(EVEN, DROP)]],
    LazyAttention: [[(TopTokens(), DROP)], [(REPRESENTATIVES, DROP)]],
    GlobalAttention: [[(TopTokens(), DROP)], [(CHUNKS, DROP)]],
    StochasticAttention: [[(EVEN, DROP)], [(TopTokens(), DROP)]],
    RobustAttention: [[(TopTokens(), DROP)], [(REPRESENTATIVES, SIMILAR)]],
    Votes: [[(CHUNKS, SIMILAR)], [(TopTokens(), DROP)]],
    RecurrenceInterval: [[(TopTokens(), DROP)], [(PAGES, SIMILAR)]],
    AttentionClasses: [[(REPRESENTATIVES, DROP)], [(TopTokens(), DROP)]],
    Ladder: [[(TopTokens(), DROP)], [(REPRESENTATIVES, DROP)]],
    BlockByBlock: [[(TopTokens(), DROP)], [(REPRESENTATIVES, DROP)]],
    TaskAttention: [[(REPRESENTATIVES, DROP)], [(PAGES, DROP)]],
    Reconstruction: [[], [(TopTokens(), GAUSSIAN)]],
    Attribution: [[], [(EVEN, DROP)]],
    LearnedScore: [[(TopTokens(), DROP)], [(REPRESENTATIVES, DROP)]],
    SavedExpectedAttention: [[(TopTokens(), DROP)], [(EVEN, DROP)]],
    QueryFilter: [[(EVEN, DROP)], [(TopTokens(), DROP)]],
    DistancePreference: [[(TopTokens(), SIMILAR)], [(PAGES, DROP)]],
}

# Scores in the tests of their methods have no pair of their own here. Those of replays need allocated budgets.
for score in OF_METHODS:
    TRIED.setdefault(
        type(score), [[(TopTokens(), DROP)] * (not isinstance(score, ReplayedScore)), [(TopTokens(), DROP)]]
    )
