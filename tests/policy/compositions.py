"""Everything that can be composed, on one layer's random queries and keys.

The score of a composition is evaluated once per prompt and before each eviction. `Policy.compress`, `Policy.retain` and
`Layers.make_room` then run with these numbers as the score, so that a program serves all scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attend import Reading, ReadPlan, RoomMaker
from kvjax.cache import Layers, Slots
from kvjax.methods.common.replayed import ReplayedScore
from kvjax.methods.kvcrush.query_heads import by_query_head
from kvjax.models import AttentionLayer, Rope
from kvjax.pallas_kernels import Reduction
from kvjax.parts import (
    AccumulatedAttention,
    AdaptiveShares,
    AttentionClasses,
    Attribution,
    BlockByBlock,
    Chunks,
    CompositeShares,
    DenseLayers,
    DistancePreference,
    Drop,
    DynamicShares,
    EvenChunks,
    Everything,
    ExpectedAttention,
    Fixed,
    FoldedWindow,
    Fraction,
    GatedShares,
    GaussianMerge,
    GlobalAttention,
    GlobalShares,
    HeadShares,
    ImportanceShares,
    JointImportance,
    KeyDifference,
    KeyNorm,
    Ladder,
    LagDifference,
    LastAttention,
    LazyAttention,
    LazyLayers,
    LearnedScore,
    LeveragedAttention,
    LeverageScore,
    LostOutput,
    NearestValues,
    Neglect,
    Newest,
    NoisyAttention,
    NonCausalAttention,
    ObservedAttention,
    Pages,
    PerLayer,
    Pooling,
    ProjectedValues,
    Pyramid,
    QueryFilter,
    QueryHeadAttention,
    QuerySample,
    RandomDraw,
    Recency,
    Reconstruction,
    RecoveringHeads,
    RecurrenceInterval,
    Representatives,
    RobustAttention,
    SavedExpectedAttention,
    SimilarityMerge,
    SquaredNorms,
    StochasticAttention,
    TaskAttention,
    ThresholdShares,
    TopTokens,
    UniformShares,
    ValueCapacity,
    ValueMerge,
    VarianceShares,
    Votes,
    WindowAttention,
)
from kvjax.policies import PRESETS
from kvjax.policy import LayerShape, Merge, Moment, Needs, Policy, Protect, Score
from tests.policy.literal_allocation import RECENT, SINKS
from tests.policy.presets import of_its_test

L, H, G, D, SIZE = 2, 4, 2, 8, 24
LENGTHS = (24, 15, 6)  # the last within every budget
PROTECT = Protect(sinks=SINKS, recent=RECENT)
MEAN = Reduction(rows="sum", group="mean")

SCORES: tuple[Score, ...] = (
    Recency(),
    RandomDraw(),
    KeyNorm(),
    KeyDifference(),
    LeverageScore(),
    LagDifference(sinks=2, lag=4),
    ExpectedAttention(sinks=2, future=4),
    SavedExpectedAttention(sinks=2, future=4),
    QueryFilter(),
    DistancePreference(8),
    LearnedScore("kvzap"),
    AccumulatedAttention(),
    QueryHeadAttention(AccumulatedAttention()),
    NoisyAttention(),
    Neglect(window=8),
    LastAttention(),
    WindowAttention(4, MEAN),
    WindowAttention(4, MEAN, Pooling("max", 3)),
    FoldedWindow(4, 2, MEAN, ahead=True),
    JointImportance(4, Pooling("max", 3), 0.07, 0.5),
    ProjectedValues(AccumulatedAttention()),
    ObservedAttention(),
    SquaredNorms(window=5),
    ValueCapacity(sinks=2, future=4),
    NonCausalAttention(5),
    LeveragedAttention(NonCausalAttention(5, 1, 2)),
    BlockByBlock(KeyDifference(), 5),
    QuerySample(AccumulatedAttention(), 3),
    GlobalAttention(4, 0.8, 0.5, 0.5),
    LazyAttention(2, 4, 1),
    StochasticAttention(4, Pooling("avg", 3), 0.25, 2, 0),
    RobustAttention(0.4),
    Votes(window=8),
    RecurrenceInterval(0.1),
    Ladder(2, 4, 3, 1),
    AttentionClasses(sinks=2),
    TaskAttention("self"),
    Reconstruction(),
    Attribution(),
)
# Scores of methods whose own tests say with which sizes these tests try them.
OF_METHODS: tuple[Score, ...] = tuple(chain.from_iterable(of_its_test(name, "SCORES", ()) for name in PRESETS))
SCORES += OF_METHODS
BUDGETS = {  # and what each gives two layers, before that is raised to the minimum; None for all entries
    Fixed(12): lambda length: (12, 12),
    Fraction(0.5): lambda length: (length // 2, length // 2),
    DenseLayers(Fixed(12), 1): lambda length: (None, 12),
    Pyramid(Fixed(12), window=4, beta=2): lambda length: (16, 8),  # 4 and 12, 4 and 4
    PerLayer(Fixed(12), (1.0, 1.5)): lambda length: (12, 18),
}
ALLOCATED = (
    CompositeShares(Fixed(12)),
    DynamicShares(Fixed(12)),
    AdaptiveShares(Fixed(12), normalise=False),
    GlobalShares(Fraction(0.5), groups=2),
    GlobalShares(Fixed(12)),
    VarianceShares(Fixed(12), dense_first=0, dense_last=0),
    UniformShares(Fixed(12)),
    LazyLayers(Fixed(12), 6, 0.5),
    RecoveringHeads(Fixed(12), 0.8, groups=2),
    ThresholdShares(Fixed(12), 0.05, groups=2),
    ImportanceShares(Fixed(12), ((0.1, 0.5, 0.2, 0.35), (0.3, 0.05, 0.15, 0.25)), groups=2),
    HeadShares(Fixed(12), ((0.9, 0.4, 0.1, 0.3), (0.3, 0.05, 0.6, 0.7)), groups=2),
    GatedShares(Fixed(12), full=((True, False, False, False), (False, True, False, True))),
)
QUERY_BITS = Representatives(TopTokens(), 0.5, bits="query")
SELECTS = (
    *(TopTokens(), Newest(), Representatives(TopTokens(), 0.5), QUERY_BITS),
    *(Chunks(TopTokens(), 5), EvenChunks(chunk=5), Pages(TopTokens(), 3)),
)
GAUSSIAN = GaussianMerge(heavy=1, theta=None)
MERGES: tuple[Merge, ...] = (Drop(), ValueMerge(tokens=3), GAUSSIAN, SimilarityMerge(), NearestValues())
RHYTHMS = (None, 1, 4)

ROWS = len(ALLOCATED) * len(LENGTHS)
lengths = np.tile(LENGTHS, len(ALLOCATED))  # of the rows of each layer
both = np.tile(lengths, L)  # of the rows of both layers, one layer after the other
INCOMING = np.arange(L * ROWS) % ROWS != 3
ORIGIN = np.broadcast_to(np.arange(SIZE, dtype=np.int32), (L * ROWS, H, SIZE))

RNG = np.random.default_rng(0)
LAYER = AttentionLayer(
    1,
    Rope(1e4),
    None,
    D**-0.5,
    jnp.asarray(RNG.normal(size=(H * G, D, 16)), jnp.float32),
    hidden=jnp.asarray(np.random.default_rng(1).normal(size=(L * ROWS, SIZE, H)), jnp.float32),
    residual=jnp.asarray(np.random.default_rng(6).normal(size=(L * ROWS, SIZE, 16)), jnp.float32),
    gates={"kvzap": lambda hidden: jnp.swapaxes(hidden, 1, 2)},
    statistics={
        "q_filters": jnp.asarray(np.random.default_rng(2).normal(size=(H, D))),
        "query_mean": jnp.asarray(np.random.default_rng(3).normal(size=(H * G, D))),
        "query_cov": jnp.asarray(np.random.default_rng(4).uniform(size=(H * G, D, 1)) * np.eye(D)),
        "query_norms": jnp.asarray(np.random.default_rng(5).uniform(1, 5, size=(H * G, D // 2))),
    },
)
QUERIES, KEYS, VALUES = (jnp.asarray(RNG.normal(size=(L * ROWS, n, SIZE, D)), jnp.float32) for n in (H * G, H, H))


def refused(score: Score, budget: Any, select: Any, merge: Merge, every: int | None) -> bool:
    """What makes no sense, and nothing else."""
    needs, own = score.needs, score in OF_METHODS  # by its facts; the others are told apart independently of these
    accumulates = type(score) in (AccumulatedAttention, NoisyAttention, QueryHeadAttention, QuerySample)
    accumulates |= own and "accumulates" in needs.marks and not ("weighs_values" in needs.marks or needs.by_count)
    keeps = WindowAttention | FoldedWindow | JointImportance | NonCausalAttention | LeveragedAttention | QuerySample
    window = isinstance(score, keeps | GlobalAttention | StochasticAttention | LazyAttention)
    window |= own and needs.keeps_queries
    inner = getattr(score, "base", score)
    alike = CompositeShares | DynamicShares | LazyLayers | UniformShares | VarianceShares  # in all heads of a layer
    return (
        (isinstance(score, LastAttention) and budget in ALLOCATED and not isinstance(budget, alike))
        or (isinstance(budget, RecoveringHeads) and not isinstance(score, AttentionClasses))
        or (isinstance(score, LostOutput | ReplayedScore | TaskAttention) and every is not None)
        or (isinstance(score, Ladder) and every not in (None, 1))
        or (isinstance(score, ReplayedScore) and budget not in ALLOCATED)
        or (isinstance(merge, ValueMerge) and (every is None or not accumulates))
        or (isinstance(merge, GaussianMerge | SimilarityMerge) and every is not None and window)
        or (isinstance(inner, WindowAttention) and inner.pooling is not None and every is not None)
        or (
            isinstance(score, ProjectedValues | BlockByBlock | StochasticAttention | RobustAttention | Ladder)
            and isinstance(select, Chunks | Pages)
        )
        or (isinstance(budget, ThresholdShares) and select.compares != "scores")
        or (select == QUERY_BITS and not isinstance(score, QueryHeadAttention))
    )


@cache
def compositions() -> dict[tuple, dict[Any, Policy]]:
    """The policies by (score, select, merge, every), then by budget; all others are refused by name."""
    sound: dict[tuple, dict[Any, Policy]] = {}
    for score, select, merge, every in product(SCORES, SELECTS, MERGES, RHYTHMS):
        for budget in (*BUDGETS, *ALLOCATED, Everything()):
            given, error = (score, budget, select, merge), ""
            try:
                sound.setdefault((score, select, merge, every), {})[budget] = Policy(*given, PROTECT, every)
            except ValueError as found:
                error = str(found)
            assert refused(*given, every) == bool(error), f"{given}, every={every}: {error}"
            if not error:
                continue
            parts = *given, getattr(score, "pooling", None), getattr(score, "base", None)
            names = {type(part).__name__ for part in parts} | {f"every={every}"}
            assert sum(name in error for name in names) >= 2, f"{given}, every={every}: {error}"
    return sound


class Shown(NamedTuple):
    """State per slot: an entry's score, what it received from each query head, and its slot in the prompt."""

    scores: Any
    received: Any
    origin: Any


@dataclass(frozen=True)
class Given(Score):
    """Scores that are known."""

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"accumulates", "query_heads"}))

    def __call__(self, entries: Slots, moment: Moment):
        return entries.per_slot.scores


@cache
def given(select: Any, merge: Merge, every: int) -> Policy:
    """A policy that is shown its scores. Its budgets are the capacities of the entries."""
    return Policy(Given(), Fixed(12), select, merge, PROTECT, every)


@partial(jax.jit, static_argnums=0)
def observed(score: Score) -> Slots:
    """The complete prompt, packed in order of position, after the score has seen it."""
    behind = jnp.arange(SIZE - 1, -1, -1)
    positions = jnp.where(behind < both[:, None], both[:, None] - 1 - behind, -1)
    budget = UniformShares(Fixed(12)) if isinstance(score, ReplayedScore) else Fixed(12)
    policy = Policy(score, budget, TopTokens(), Drop(), PROTECT)
    nothing = jnp.zeros((L * ROWS, H, 0), int)
    empty = Slots(KEYS[:, :, :0], VALUES[:, :, :0], nothing, jnp.full((L * ROWS, H), 12, jnp.int32))
    plan = ReadPlan((SIZE,) * 2, (None,) * 2, final=False)
    attend = Reading(policy, policy.limits(2), plan)(positions, jnp.asarray(both), jnp.asarray(both))
    _, layers = attend(LAYER, QUERIES, KEYS, VALUES, Layers((empty, empty)))
    return layers[1]


by_head = jax.jit(by_query_head)


@partial(jax.jit, static_argnums=0)
def judged(score: Score, entries: Slots, counts: Any) -> tuple[Any, Any]:
    """The scores of all entries, -inf for empty slots; and what query heads gave them, 0 if the score does not know."""
    budget = UniformShares(Fixed(12)) if isinstance(score, ReplayedScore) else Fixed(12)
    policy, moment = Policy(score, budget, TopTokens(), Drop(), PROTECT), Moment(jnp.asarray(both), LAYER)
    known = "query_heads" in score.needs.marks
    received = entries.per_slot.received if known else jnp.zeros((*entries.positions.shape[:2], G, entries.slots))
    return policy.rank(entries, moment, counts, raised=False), received


@partial(jax.jit, static_argnums=0)
def compressed(policy: Policy, entries: Slots, shown: Shown) -> Slots:
    """The prompt after its compression to the capacities of its heads, with `shown` for state."""
    shape = LayerShape(L * ROWS, H * G, H, D, jnp.dtype(jnp.float32), 16)
    entries = replace(entries, per_slot=shown, merging=policy.merge.init(shape))
    return policy.compress(entries, Moment(jnp.asarray(both), LAYER), SIZE)


@partial(jax.jit, static_argnums=0)
def with_room(policy: Policy, entries: Slots, scores: Any) -> tuple[Slots, Any]:
    """The entries once full heads have made room for a token, and the slot that is free for it."""
    entries = replace(entries, per_slot=entries.per_slot._replace(scores=scores))
    room = RoomMaker.of(policy, Moment(jnp.asarray(both), LAYER), jnp.asarray(INCOMING), policy.limits(L))
    layers, slot = Layers((entries, entries)).make_room(1, jnp.asarray(INCOMING), room)
    return layers[1], slot


@jax.jit
def with_state(left: Slots, whole: Slots) -> Slots:
    """The retained entries with the state that the score had for them in the prompt."""
    state = whole.gather(jnp.where(left.positions >= 0, left.per_slot.origin, -1))
    return replace(left, per_slot=state.per_slot, per_row=state.per_row)


def after(score: Score, select: Any, merge: Merge, every: int | None, capacity: np.ndarray, whole: Slots):
    """A composition on a prompt: its scores, the retained entries, and what its next token finds.

    Returns:
        (scores and query heads' scores of the prompt, retained entries with the score's state, scores before the
        eviction, entries after the eviction and the slot that is free); the last two are None without a rhythm.
    """
    entries = replace(whole, capacity=jnp.asarray(capacity))
    counts = np.minimum(capacity, SIZE)
    scores, received = judged(score, entries, counts)
    # Without the state of the score, whose form would make it a program of its own. No part is told the rhythm here.
    bare, shown = replace(entries, per_slot=None, per_row=None), Shown(scores, received, ORIGIN)
    queries = by_head(replace(bare, per_slot=shown)).reshape(received.shape)
    left = compressed(given(select, merge, 1), bare, shown)
    kept = with_state(replace(left, merging=None), entries)
    if every is None:
        return (scores, queries), kept, None, None
    before = judged(score, kept, counts)[0]
    return (scores, queries), kept, before, with_room(given(select, merge, every), left, before)
