"""Every score with every budget, selection, merge and rhythm: refused by name when it is built, or sound.

What a part does of its own is tested elsewhere. Here all that can be put together is, and run on one layer that has
read random queries and keys: `Policy.compress` and `Policy.make_room` themselves, with the parts' methods compiled
once for all the policies that they are in. A few compositions that no preset has run through a model as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import parts
from kvjax.attention import reading
from kvjax.cache import LayerCache
from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer, Rope
from kvjax.pallas_kernels import Reduction
from kvjax.parts import (
    AccumulatedAttention,
    AdaptiveShares,
    Chunks,
    CompositeShares,
    DenseLayers,
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
    GlobalShares,
    KeyDifference,
    KeyNorm,
    LagDifference,
    LastAttention,
    Neglect,
    NoisyAttention,
    Pool,
    ProjectedValues,
    Pyramid,
    RandomDraw,
    Recency,
    Reconstruction,
    Representatives,
    SimilarityMerge,
    TaskAttention,
    ThresholdAttention,
    TopTokens,
    UniformShares,
    ValueMerge,
    VarianceShares,
    WatchedRecency,
    WindowAttention,
)
from kvjax.policy import Policy, Protect
from kvjax.protocols import Merge, Moment, Score, Storage
from kvjax.replay import ReplayScore
from tests import tiny

H, G, D, SIZE = 2, 2, 8, 24
LENGTHS = (24, 15, 6)  # the last within every budget
PROTECT = Protect(sinks=2, recent=4)
MEAN = Reduction(rows="sum", group="mean")

SCORES: tuple[Score, ...] = (
    Recency(),
    RandomDraw(),
    KeyNorm(),
    KeyDifference(),
    LagDifference(sinks=2, lag=4),
    ExpectedAttention(sinks=2, future=4),
    AccumulatedAttention(),
    WatchedRecency(),
    NoisyAttention(),
    Neglect(window=8),
    LastAttention(),
    WindowAttention(4, MEAN),
    WindowAttention(4, MEAN, Pool("max", 3)),
    FoldedWindow(4, 2, MEAN, ahead=True),
    ProjectedValues(AccumulatedAttention()),
    TaskAttention("self"),
    ThresholdAttention(),
    Reconstruction(),
)
BUDGETS = {  # and what each gives the second of two layers, before that is raised to what must stay
    Fixed(12): lambda length: 12,
    Fraction(0.5): lambda length: length // 2,
    DenseLayers(Fixed(12), 1): lambda length: 12,
    Pyramid(Fixed(12), window=4, beta=2): lambda length: 8,  # 4 and half of the mean of 8
}
SHARED = (
    CompositeShares(Fixed(12)),
    DynamicShares(Fixed(12)),
    AdaptiveShares(Fixed(12), normalise=False),
    GlobalShares(Fraction(0.5), groups=2),
    GlobalShares(Fixed(12)),
    VarianceShares(Fixed(12), first=0, last=0),
    UniformShares(Fixed(12)),
    GatedShares(Fixed(12), full=((True, False),)),
)
SELECTS = (TopTokens(), Representatives(TopTokens(), 0.5), Chunks(TopTokens(), 5), EvenChunks(length=5))
MERGES: tuple[Merge, ...] = (Drop(), ValueMerge(tokens=3), GaussianMerge(heavy=1), SimilarityMerge())
RHYTHMS = (None, 1, 4)

RNG = np.random.default_rng(0)
ROWS = len(BUDGETS) * len(LENGTHS)  # budgets by lengths
lengths = np.tile(LENGTHS, len(BUDGETS))
LAYER = AttentionLayer(1, Rope(1e4), None, D**-0.5, jnp.asarray(RNG.normal(size=(H * G, D, 16)), jnp.float32))
INCOMING = np.arange(ROWS) != 3
MOMENT = Moment(jnp.asarray(lengths), LAYER)
QUERIES, KEYS, VALUES = (jnp.asarray(RNG.normal(size=(ROWS, n, SIZE, D)), jnp.float32) for n in (H * G, H, H))

# Numbers of 32 bits that a score keeps for each slot of a kv head, and for each row.
RING = 4 * (H * G * (D + 1) + H)
STATE = {
    AccumulatedAttention: (1, 0),
    WatchedRecency: (1, 0),
    ThresholdAttention: (1, H),
    NoisyAttention: (1, H),
    Neglect: (1, 0),
    LastAttention: (1, 0),
    WindowAttention: (0, RING),
    FoldedWindow: (3, RING),
    ExpectedAttention: (0, H * G * (1 + D + D * D)),
    ProjectedValues: (1, 0),
    TaskAttention: (G + 1, 0),
    Reconstruction: (1, 0),
}


def refused(score, budget, merge, every):
    """What makes no sense, and nothing else."""
    if isinstance(score, LastAttention) and isinstance(budget, GlobalShares | AdaptiveShares | GatedShares):
        return True
    if isinstance(score, ReplayScore) and every is not None:
        return True
    if isinstance(score, Reconstruction) and budget not in SHARED:
        return True
    if isinstance(merge, ValueMerge) and (every is None or not isinstance(score, AccumulatedAttention)):
        return True
    if isinstance(merge, GaussianMerge) and every is not None:
        return True
    if isinstance(merge, SimilarityMerge) and not isinstance(score, ThresholdAttention):
        return True
    return isinstance(score, WindowAttention) and score.pool is not None and every is not None


@cache
def compositions():
    """Those that can be built, each with its policies by budget; checks that the others are refused by name."""
    sound = {}
    for score, select, merge, every in product(SCORES, SELECTS, MERGES, RHYTHMS):
        for budget in (*BUDGETS, *SHARED, Everything()):
            given = (score, budget, select, merge)
            policy, error = built(*given, PROTECT, every)
            assert refused(score, budget, merge, every) == bool(error), f"{given}, every={every}: {error}"
            if policy is not None:
                sound.setdefault((score, select, merge, every), {})[budget] = policy
                continue
            within = (getattr(score, "pool", None), getattr(score, "base", None))
            names = {type(part).__name__ for part in (*given, *within)} | {f"every={every}"}
            assert sum(name in error for name in names) >= 2, f"{given}, every={every}: {error}"
    return sound


def built(*given) -> tuple[Policy | None, str]:
    """The policy, or what its ValueError says."""
    try:
        return Policy(*given), ""
    except ValueError as error:
        return None, str(error)


def test_what_makes_no_sense_is_refused_by_name():
    assert 200 < len(compositions()) < len(SCORES) * len(SELECTS) * len(MERGES) * len(RHYTHMS)


def test_every_part_is_here():
    """But for how entries are held, which the others do not see."""
    here = {type(part) for part in (*SCORES, *BUDGETS, *SHARED, *SELECTS, *MERGES, Everything(), Pool())}
    classes = {getattr(parts, name) for name in parts.__all__ if name != "budget_of"}
    classes -= {part for part in classes if issubclass(part, Storage)}
    assert classes == here


def test_without_a_budget_everything_is_kept():
    """U1 needs no more: a layer that is not limited is never compressed and never evicts."""
    for (score, *_), policies in compositions().items():
        if isinstance(score, Reconstruction):  # which takes a budget that is shared out
            continue
        policy = policies[Everything()]
        assert not policy.limited(1)
        assert policy.grows(1)
        assert policy.slots(1, SIZE, 2) is None


@partial(jax.jit, static_argnums=0)
def observed(score: Score) -> LayerCache:
    """The whole prompt, packed in order of position, after the score has seen it."""
    behind = jnp.arange(SIZE - 1, -1, -1)
    positions = jnp.where(behind < lengths[:, None], lengths[:, None] - 1 - behind, -1)
    budget = UniformShares(Fixed(12)) if isinstance(score, Reconstruction) else Fixed(12)
    policy = Policy(score, budget, TopTokens(), Drop(), PROTECT)
    empty = LayerCache(
        KEYS[:, :, :0], VALUES[:, :, :0], jnp.zeros((ROWS, H, 0), int), jnp.full((ROWS, H), 12, jnp.int32)
    )
    options = {"slots": (SIZE,) * 2, "kept": (SIZE,) * 2, "compress": False, "final": False}
    attend = reading(policy, positions, jnp.asarray(lengths), jnp.asarray(lengths), **options)
    _, (_, entries) = attend(LAYER, QUERIES, KEYS, VALUES, (empty, empty))
    return entries


class Compiled:
    """A part of a policy whose methods are compiled, each once however many policies the part is in."""

    def __init__(self, part):
        self.part = part

    def __call__(self, *args):
        return self._run("__call__", args)

    def __getattr__(self, name):
        return lambda *args: self._run(name, args)

    def _run(self, name, args):
        if name == "absorb_rest" and type(self.part).absorb_rest is Merge.absorb_rest:
            return args[0]
        if name == "condense":  # without the score's state, with which there were another program for each score
            bare = self._compile(name, (replace(args[0], per_slot=None, per_row=None), *args[1:]))
            return replace(bare, per_slot=args[0].per_slot, per_row=args[0].per_row)
        return self._compile(name, args)

    def _compile(self, name, args):
        static = tuple(x if isinstance(x, int | Heads) else None for x in args)
        arrays = (None if isinstance(x, int | Heads) else x for x in args)
        arrays = (x._replace(layer=None, heads=None) if isinstance(x, Moment) else x for x in arrays)
        return _call(self.part, name, static, tuple(arrays))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _call(part, name, static, arrays):
    args = (x if s is None else s for x, s in zip(arrays, static, strict=True))
    args = (x._replace(layer=LAYER, heads=ALL_HEADS) if isinstance(x, Moment) else x for x in args)
    return getattr(part, name)(*args)


def compiled(policy: Policy) -> Policy:
    other = object.__new__(Policy)
    for name, value in vars(policy).items():
        part = name in ("score", "select", "merge") and type(value) is not Drop
        object.__setattr__(other, name, Compiled(value) if part else value)
    return other


def bytes_of(score: Score, slots: int) -> int:
    """The closed form: key, value and position of each slot, a capacity for each head, the score's state."""
    per_slot, per_row = STATE.get(type(score), (0, 0))
    return 4 * ROWS * (H * (slots * (2 * D + 1 + per_slot) + 1) + per_row)


def heads_of(entries: LayerCache) -> list[list[set[int]]]:
    """The positions in each head of each row, which are all different."""
    rows = []
    for row in np.asarray(entries.positions):
        rows.append([set(head[head >= 0].tolist()) for head in row])
        assert [len(held) for held in rows[-1]] == [(head >= 0).sum() for head in row]
    return rows


def must_stay(length: int) -> set[int]:
    return set(range(min(2, length))) | set(range(max(0, length - 4), length))


@pytest.mark.parametrize("score", SCORES[:-1], ids=lambda score: type(score).__name__)
def test_compositions_are_sound(score):
    """U1, U2, U3 and U6 when a prompt has been read, and when a token comes in after it."""
    whole = observed(score)
    for (other, _, merge, every), policies in compositions().items():
        if other != score:
            continue
        least = 2 + 4 + (every or 1)
        capacities = [max(entries(n), least) for entries in BUDGETS.values() for n in LENGTHS]
        given = [policies[budget].capacity(1, jnp.array(LENGTHS), 2) for budget in BUDGETS]
        assert np.concatenate(given).tolist() == capacities
        slots = max(policies[budget].slots(1, SIZE, 2) for budget in BUDGETS)
        assert slots == max(capacities)

        limits = jnp.broadcast_to(jnp.array(capacities)[:, None], (ROWS, H))
        policy = compiled(policies[Fixed(12)])
        kept = policy.compress(replace(whole, capacity=limits), MOMENT, slots)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) == bytes_of(score, slots)
        check_prompt(whole, kept, limits, merge)
        if every is not None:
            check_step(kept, policy.make_room(kept, MOMENT, INCOMING), limits, every, merge)


@pytest.mark.parametrize(
    "score",
    [pytest.param(x, marks=[] if isinstance(x, KeyNorm | LastAttention) else pytest.mark.slow) for x in SCORES],
    ids=lambda score: type(score).__name__,
)
def test_compositions_on_shared_budgets_are_sound(score):
    """The same where heads keep as many entries as their scores are worth; the first rows share as the first does."""
    whole = observed(score)
    for (other, _, merge, every), policies in compositions().items():
        if other != score:
            continue
        budgets = [budget for budget in SHARED if budget in policies]
        owner = np.arange(ROWS) * len(budgets) // ROWS
        means = np.stack([policies[budget].capacity(1, jnp.asarray(lengths), 1) for budget in budgets])
        mean = jnp.asarray(means[owner, np.arange(ROWS)])
        policy = compiled(policies[budgets[0]])
        entries = replace(whole, capacity=jnp.broadcast_to(mean[:, None], (ROWS, H)))
        scores = policy.rank(entries, MOMENT)
        least = 0 if every is None else policy.minimum
        shown = [jnp.where(scores == jnp.inf, 0, scores) if x.shows_protected else scores for x in budgets]
        shares = [
            Compiled(budget).share(x[None], mean, least, ALL_HEADS)[0] for budget, x in zip(budgets, shown, strict=True)
        ]
        counts = jnp.stack(shares)[owner, np.arange(ROWS)]
        for row, (count, length) in enumerate(zip(np.minimum(counts, lengths[:, None]), lengths, strict=True)):
            if isinstance(budgets[owner[row]], GatedShares):
                assert count.tolist() == [length, min(length, mean[row])]
                continue
            assert count.sum() == H * min(length, mean[row])
            if budgets[owner[row]].groups in (None, H):
                assert len(set(count.tolist())) == 1
        counts = jnp.where((lengths <= mean)[:, None], mean[:, None], counts)  # room that a short prompt leaves
        kept = policy.retain(replace(whole, capacity=counts), MOMENT, scores, SIZE)
        check_prompt(whole, kept, counts, merge)
        if every is not None:
            check_step(kept, policy.make_room(kept, MOMENT, INCOMING), counts, every, merge)


def check_prompt(whole, kept, capacities, merge):
    merges = isinstance(merge, GaussianMerge)
    for row, (heads, length) in enumerate(zip(heads_of(kept), lengths, strict=True)):
        for held, capacity in zip(heads, np.asarray(capacities[row]).tolist(), strict=True):
            assert must_stay(length) <= held <= set(range(length))
            assert len(held) == min(length, capacity) or (merges and len(held) < capacity < length)
        if isinstance(merge, GaussianMerge | SimilarityMerge) and length > np.min(capacities[row]):
            assert np.isfinite(kept.keys[row]).all()
            assert np.isfinite(kept.values[row]).all()
        else:  # in the whole prompt, slot i holds token i
            at = np.asarray(kept.positions[row])[..., None]
            for mine, theirs in ((kept.keys, whole.keys), (kept.values, whole.values)):
                expected = np.where(at >= 0, np.take_along_axis(np.asarray(theirs[row]), np.maximum(at, 0), axis=1), 0)
                np.testing.assert_array_equal(mine[row], expected)


def check_step(before, after, capacities, every, merge):
    """A row without a token coming in, or with room for it, is left alone."""
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
    for row, (old, new) in enumerate(zip(heads_of(before), heads_of(after), strict=True)):
        for head, (was, held) in enumerate(zip(old, new, strict=True)):
            evicts = INCOMING[row] and len(was) >= capacities[row, head]
            assert held <= was
            assert must_stay(lengths[row]) <= held
            assert len(held) == len(was) - (every if evicts else 0)
            if not (evicts and isinstance(merge, SimilarityMerge)):
                np.testing.assert_array_equal(after.keys[row, head], before.keys[row, head])
            if not (evicts and isinstance(merge, ValueMerge | SimilarityMerge)):
                np.testing.assert_array_equal(after.values[row, head], before.values[row, head])
            assert np.isfinite(after.values[row, head]).all()


SAMPLES = {
    "cam over chunks, by representatives": Policy(
        WatchedRecency(), Fixed(12), Representatives(SELECTS[2], 0.5), MERGES[1], PROTECT, 1
    ),
    "kvcrush on pyramidkv": Policy(SCORES[12], Pyramid(Fixed(12), 4, 2), SELECTS[1], Drop(), PROTECT),
    "kvmerger behind pyramidkv": Policy(SCORES[5], Pyramid(Fixed(12), 4, 2), SELECTS[3], MERGES[2], PROTECT),
    "even chunks under morphkv": Policy(SCORES[13], DenseLayers(Fixed(12), 1), SELECTS[3], Drop(), PROTECT, 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else []) for i, name in enumerate(SAMPLES)]
)
def test_a_few_run_through_a_model(name):
    """Prompts beyond the budget and within it, which are full attention for as long as they are."""
    policy, rng, steps = SAMPLES[name], np.random.default_rng(1), 3
    params = tiny.decoder(windows=(None, None))
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in (24, 5, 15)], rng.integers(0, tiny.VOCAB, (steps, 3))
    logits, cache = tiny.prefill(params, policy, rows, SIZE, room=steps)
    expected = tiny.full_logits(params, [np.append(r, t) for r, t in zip(rows, tokens.T, strict=True)], SIZE + steps)
    np.testing.assert_allclose(logits[1], expected[1][4], atol=2e-5)
    for i, token in enumerate(tokens):
        logits, cache = tiny.step(params, cache, token, np.ones(3, bool))
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[1], expected[1][5 + i], atol=2e-5)
    for layer in range(2):
        most = policy.slots(layer, SIZE, 2)
        for row, length in enumerate((24, 5, 15)):
            for held in tiny.held(cache, row)[layer]:
                assert {0, 1} | set(range(length + steps - 4, length + steps)) <= set(held)
                if most is None:
                    assert len(held) == length + steps
                else:
                    assert len(held) <= most + (steps if policy.every is None else 0)
