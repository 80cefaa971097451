"""Every score with every budget, selection, merge and rhythm: refused by name, or as a literal composition.

The literal composition is NumPy and plain Python (`literal_selection.py`, `literal_allocation.py`), given the numbers
of the score. What a part does by itself is tested elsewhere.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import parts
from kvjax.mesh.heads import ALL_HEADS
from kvjax.methods.common.replayed import ReplayedScore
from kvjax.parts import (
    Everything,
    FittedEntries,
    Fixed,
    GatedChunks,
    GatedShares,
    GaussianMerge,
    Pooling,
    SeenShare,
    SimilarityMerge,
    UniformShares,
    ValueMerge,
    WindowAttention,
)
from kvjax.policy import LayerShape, Part, Storage
from tests.policy.compositions import (
    ALLOCATED,
    BUDGETS,
    INCOMING,
    LENGTHS,
    MEAN,
    MERGES,
    RHYTHMS,
    ROWS,
    SCORES,
    SELECTS,
    SIZE,
    D,
    G,
    H,
    L,
    after,
    both,
    compositions,
    judged,
    lengths,
    observed,
    refused,
)
from tests.policy.literal_allocation import RECENT, SINKS, allocated
from tests.policy.literal_selection import after_eviction, after_prompt
from tests.policy.tried import TRIED
from tests.products import part


@pytest.mark.long
def test_what_makes_no_sense_is_refused_by_name():
    assert 300 < len(compositions()) < len(SCORES) * len(SELECTS) * len(MERGES) * len(RHYTHMS)


def test_every_part_is_here():
    """Storages are left out, since other parts do not see them, and a merge that needs the state of its own score.

    So are gated chunks: rounding decides between a chunk and the median of all where scores are alike. A budget that
    rises with the answer has tests of its own.
    """
    here = {FittedEntries, GatedChunks, SeenShare} | {
        type(part) for part in (*SCORES, *BUDGETS, *ALLOCATED, *SELECTS, *MERGES, Everything(), Pooling())
    }
    found = (getattr(parts, name) for name in dir(parts) if name not in parts.__all__)
    classes = {part for part in found if isinstance(part, type) and issubclass(part, Part)}
    missing = {part.__name__ for part in classes if not issubclass(part, Storage)} - {part.__name__ for part in here}
    assert not missing, (
        f"{missing}: define SCORES with a score in tests/methods/test_NAME.py, or add a budget, selection or merge "
        "with its literal form to tests/policy/compositions.py"
    )


def test_without_a_budget_everything_is_retained():
    """U1 follows: a layer without a limit is never compressed and never evicts."""
    for (score, *_), policies in compositions().items():
        if isinstance(score, ReplayedScore):  # it needs an allocated budget
            continue
        policy = policies[Everything()]
        assert not policy.limited(1)
        assert not policy.evicts(1, L)
        assert policy.slots(1, SIZE, L) is None


def must_stay(length: int) -> set[int]:
    return set(range(min(SINKS, length))) | set(range(max(0, length - RECENT), length))


def by_position(entries, row: int, x) -> list[dict]:
    """{position: x} of each head of a row, [B, H, S, ...]; all positions of a head are different."""
    heads = []
    for positions, own in zip(entries.positions[row], x[row], strict=True):
        there = positions >= 0
        heads.append(dict(zip(positions[there].tolist(), own[there], strict=True)))
        assert len(heads[-1]) == there.sum()
    return heads


def pairs(budget, run: int):
    """Each score with each selection and merge that it can have on such a budget; `TRIED` is chosen."""
    product_of = product(SCORES, SELECTS, MERGES)
    sound = [
        (*own, merge)
        for *own, merge in product_of
        if any(not refused(own[0], budget, *own[1:], merge, x) for x in RHYTHMS)
    ]
    return part(sound, [(score, *pair) for score in SCORES for pair in TRIED[type(score)][run]])


def rhythms(*own) -> list[tuple]:
    """The compositions of a score, a selection and a merge."""
    return [composition for composition in compositions() if composition[:3] == own]


def name_of(value) -> str:
    return type(value).__name__


def check(composition, capacity: np.ndarray, memo: dict, rows: np.ndarray) -> None:
    """Compares a composition with the literal one, after the prompt and after an eviction, on some of L * ROWS rows."""
    score, select, merge, every = composition
    whole = observed(score)
    (scores, queries), kept, before, stepped = after(score, select, merge, every, capacity, whole)
    laid_out = jax.eval_shape(partial(score.init, LayerShape(L * ROWS, H * G, H, D, np.dtype(np.float32), 16, SIZE)))
    assert jax.tree.map(np.shape, (kept.per_slot, kept.per_row)) == jax.tree.map(np.shape, laid_out)
    host = jax.tree.map(np.asarray, (whole, kept, scores, queries))
    whole, kept, scores, queries = host
    compares = isinstance(merge, GaussianMerge), select, score
    for row, length in zip(rows, both[rows], strict=True):
        counts = np.minimum(capacity[row], SIZE).tolist()
        key = (*compares, row, *counts)
        if key not in memo:
            own = by_position(whole, row, scores)
            asked = np.moveaxis(queries, 2, 0)
            by_query = list(zip(*(by_position(whole, row, x) for x in asked), strict=True))
            keys = by_position(whole, row, whole.keys)
            memo[key] = after_prompt(select, merge, keys, own, must_stay(length), counts, by_query)
        found = [set(head) for head in by_position(kept, row, scores)]
        assert found == memo[key], f"{composition}, row {row}: of {length} tokens {counts} are retained"
    check_contents(merge, whole, kept, capacity)
    if every is not None:
        check_eviction(composition, kept, before, stepped, capacity, rows)


def check_contents(merge, whole, kept, capacity) -> None:
    """Entries keep their keys and values, except in rows in which a merge had something to merge."""
    at = np.maximum(kept.positions[..., None], 0)  # in the prompt, slot i holds token i
    for mine, theirs in ((kept.keys, whole.keys), (kept.values, whole.values)):
        assert np.isfinite(mine).all()
        expected = np.take_along_axis(theirs, at, axis=2)
        expected = np.where(kept.positions[..., None] >= 0, expected, 0)
        same = both[:, None] <= capacity if merge.effects.at_prompt else np.ones(capacity.shape, bool)
        np.testing.assert_array_equal(mine[same], expected[same])


def check_eviction(composition, kept, before, stepped, capacity, rows) -> None:
    """Full heads in rows with a token make room for it. All others stay as they are."""
    _, select, merge, every = composition
    entries, slot = jax.tree.map(np.asarray, stepped)
    assert entries.positions.shape == kept.positions.shape
    scores = np.asarray(before)
    for row, length in zip(rows, both[rows], strict=True):
        was = zip(by_position(kept, row, scores), by_position(kept, row, kept.keys), strict=True)
        now = by_position(entries, row, entries.values)
        for head, (own, keys) in enumerate(was):
            expected = set(own)
            full = INCOMING[row] and len(own) >= capacity[row, head]
            if full:
                count = min(capacity[row, head], SIZE)
                expected = after_eviction(select, merge, keys, own, must_stay(length), count, every)
                assert len(expected) == count - every or isinstance(merge, GaussianMerge)
            assert set(now[head]) == expected, f"{composition}, row {row}, head {head}"
            assert not INCOMING[row] or len(expected) == SIZE or entries.positions[row, head, slot[row, head]] < 0
    full = INCOMING[:, None] & (np.sum(kept.positions >= 0, axis=-1) >= capacity)
    for now, was, merges in (
        (entries.keys, kept.keys, GaussianMerge | SimilarityMerge),
        (entries.values, kept.values, GaussianMerge | SimilarityMerge | ValueMerge),
    ):
        same = ~(full & isinstance(merge, merges))
        np.testing.assert_array_equal(now[same], was[same])
    assert np.isfinite(entries.values).all()


@pytest.mark.slow(first=3)
@pytest.mark.parametrize(("score", "select", "merge"), pairs(Fixed(12), 0), ids=name_of)
def test_compositions_are_the_literal_ones(score, select, merge):
    """U1, U2, U3 and U6 when a prompt has been read, and when a token comes in after it."""
    memo: dict = {}
    once = np.flatnonzero(np.arange(L * ROWS) % ROWS < len(BUDGETS) * len(LENGTHS))  # the other rows repeat the budgets
    for composition in rhythms(score, select, merge):
        policies, every = compositions()[composition], composition[3]
        least = SINKS + RECENT + (every or 1)
        capacity = np.zeros((L, ROWS), np.int32)
        for i, (budget, entries) in enumerate([*BUDGETS.items(), *BUDGETS.items()]):
            for layer, rows in enumerate(capacity):
                own = rows[i * len(LENGTHS) : (i + 1) * len(LENGTHS)]
                own[:] = policies[budget].capacity(layer, jnp.array(LENGTHS), L)
                given = [entries(n)[layer] for n in LENGTHS]
                assert [None if n > SIZE else n for n in own.tolist()] == [n and max(n, least) for n in given]
                slots = policies[budget].slots(layer, SIZE, L)
                assert slots == (None if None in given else max(own))
        check(composition, np.repeat(capacity.reshape(-1, 1), H, axis=1), memo, once)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("score", "select", "merge"), pairs(UniformShares(Fixed(12)), 1), ids=name_of)
def test_compositions_on_allocated_budgets_are_the_literal_ones(score, select, merge):
    """The same for heads that retain as many entries as their scores deserve; three rows for each budget."""
    memo: dict = {}
    for composition in rhythms(score, select, merge):
        policies, every = compositions()[composition], composition[3]
        counts = counts_of(score, tuple(budget for budget in ALLOCATED if budget in policies), every)
        check(composition, counts, memo, np.arange(L * ROWS))


@partial(jax.jit, static_argnums=(0, 3))
def allocate(budget, scores, means, least):
    return budget.allocate(scores, means, least, ALL_HEADS)


# It is a fact of steps, which a window that pools its votes does not take.
STEPPING = (x for x in (*SCORES, WindowAttention(4, MEAN, normalise="distant")) if not getattr(x, "pooling", None))
SLOTWISE = [score for score in STEPPING if score.needs.slotwise]


def test_which_scores_are_slotwise():
    """A decode step judges their entries a piece at a time (`Policy.piecewise`)."""
    names = "Recency RandomDraw KeyNorm QueryFilter LearnedScore AccumulatedAttention QueryHeadAttention"
    more = "WindowAttention FoldedWindow ObservedAttention QuerySample RecurrenceInterval HiddenChange"
    assert {type(score).__name__ for score in SLOTWISE} == {*names.split(), *more.split()}


@pytest.mark.parametrize("score", SLOTWISE, ids=name_of)
def test_a_slotwise_score_is_of_its_entry_alone(score):
    """It is what it is among all entries if half of them are not there."""
    whole, known = observed(score), np.full((L * ROWS, H), SIZE, np.int32)
    half = whole.gather(np.broadcast_to(np.arange(0, SIZE, 2), (L * ROWS, H, SIZE // 2)))
    (alone, _), (among, _) = judged(score, half, known), judged(score, whole, known)
    np.testing.assert_allclose(alone, among[:, :, ::2], rtol=1e-5)


@cache
def counts_of(score, budgets, every) -> np.ndarray:
    """The capacities [L * ROWS, H] under allocated budgets, three rows each, after a comparison with the literal ones.

    Rows of budgets that the score refuses have those of the first one.
    """
    whole = observed(score)
    known = None if score.needs.by_count else np.full((L * ROWS, H), SIZE, np.int32)
    scores = np.asarray(judged(score, whole, known)[0]).reshape(L, ROWS, H, SIZE)
    least = 0 if every is None else SINKS + RECENT + every
    result = np.zeros((L, ROWS, H), np.int64)
    for i, budget in enumerate(ALLOCATED):
        budget = budget if budget in budgets else budgets[0]
        rows = slice(i * len(LENGTHS), (i + 1) * len(LENGTHS))
        mean = np.maximum(np.asarray(budget.capacity(0, lengths[rows], L)), SINKS + RECENT + (every or 1))
        own = scores[:, rows]
        protected = np.array([[p in must_stay(n) for p in range(SIZE)] for n in LENGTHS])
        raised = np.where(protected[:, None] & ~np.bool_(budget.layout.compares_protected), np.inf, own)
        counts = np.asarray(allocate(budget, jnp.asarray(raised), jnp.tile(mean, (L, 1)), least))
        for row, length in enumerate(LENGTHS):
            expected = allocated(budget, own[:, row, :, :length], int(mean[row]), least)
            got = np.minimum(counts[:, row], length)
            assert got.tolist() == expected.tolist(), f"{score}, {budget}, every={every}: a prompt of {length} tokens"
            assert got.sum() <= L * H * min(length, mean[row]) or isinstance(budget, GatedShares)
            lanes = budget.layout.lanes(H)
            most = got.reshape(L, lanes, -1).sum(axis=(0, 2)).max()
            assert most <= budget.entries([int(mean[row])] * L, [length] * L, H // lanes), "the room of a lane"
        within = (np.array(LENGTHS) <= mean)[None, :, None] & (counts <= SIZE)
        result[:, rows] = np.where(within, mean[None, :, None], counts)  # room that a short prompt leaves
    return result.reshape(L * ROWS, H).astype(np.int32)
