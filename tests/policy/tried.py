"""What each score keeps, and the selection and the merge that it tries in `test_composition.py`."""

from __future__ import annotations

from kvjax.parts import (
    AccumulatedAttention,
    AttentionClasses,
    BlockByBlock,
    Chunks,
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
    QueryHeadAttention,
    QuerySample,
    RandomDraw,
    Recency,
    Reconstruction,
    RecurrenceInterval,
    Representatives,
    RobustAttention,
    SquaredNorms,
    StochasticAttention,
    TaskAttention,
    TopTokens,
    ValueCapacity,
    Votes,
    WindowAttention,
)
from kvjax.policy import Merge, Score, Select
from tests.policy.compositions import MERGES, QUERY_BITS, SELECTS, D, G, H

# Numbers of 32 bits that a score keeps for each slot of a kv head, and for each row.
RING = 4 * (H * G * (D + 1) + H)
STATE = {
    AccumulatedAttention: (1, 0),
    QueryHeadAttention: (1 + G, 0),
    NoisyAttention: (1, H),
    Neglect: (1, 0),
    LastAttention: (1, 0),
    WindowAttention: (0, RING),
    FoldedWindow: (3, RING),
    JointImportance: (0, RING),
    ExpectedAttention: (0, H * G * (1 + D + D * D)),
    ProjectedValues: (1, 0),
    ObservedAttention: (1, 0),
    ValueCapacity: (0, H * G * (1 + D)),
    NonCausalAttention: (1, 5 * RING // 4),
    LeveragedAttention: (1, 7 * RING // 4),
    QuerySample: (1, 3 * (H * G * D + 2 * H)),
    GlobalAttention: (2, RING),
    LazyAttention: (0, RING // 4),
    StochasticAttention: (0, RING),
    RobustAttention: (2, 0),
    Votes: (2, 0),
    RecurrenceInterval: (2, 0),
    AttentionClasses: (1, 0),
    TaskAttention: (G + 1, 0),
    Reconstruction: (1, 0),
    LearnedScore: (1, 0),
}


REPRESENTATIVES, CHUNKS, EVEN, PAGES = (
    next(select for select in SELECTS if type(select) is kind) for kind in (Representatives, Chunks, EvenChunks, Pages)
)
DROP, VALUES, GAUSSIAN, SIMILAR = MERGES
# The selection and the merge that each score tries, with all rhythms that it can have: on budgets that are not
# allocated, then on allocated ones. A program serves all scores, so that one of each kind of them tries a pair. Window
# scores have no rhythm under a merge, so that they try merges of prompts.
TRIED: dict[type[Score], list[list[tuple[Select, Merge]]]] = {
    Recency: [[(Newest(), SIMILAR)], [(EVEN, DROP)]],
    RandomDraw: [[(TopTokens(), DROP)], [(Newest(), SIMILAR)]],
    KeyNorm: [[(Newest(), DROP)], [(TopTokens(), DROP)]],
    KeyDifference: [[(REPRESENTATIVES, DROP)], [(Newest(), DROP)]],
    LeverageScore: [[(CHUNKS, DROP)], [(EVEN, SIMILAR)]],
    LagDifference: [[(EVEN, DROP)], [(REPRESENTATIVES, DROP)]],
    ExpectedAttention: [[(PAGES, DROP)], [(CHUNKS, DROP)]],
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
    SquaredNorms: [[(EVEN, DROP)], [(TopTokens(), DROP)]],
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
    LearnedScore: [[(TopTokens(), DROP)], [(REPRESENTATIVES, DROP)]],
}
