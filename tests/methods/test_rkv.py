"""R-KV against its equations in float64 NumPy, one head of one text at a time."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.common.redundancy import redundancy
from kvjax.methods.common.window_attention import QueryRing
from kvjax.methods.rkv import JointImportance
from kvjax.parts import Pooling
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=4,kernel=3,every=3", "budget=0.5,window=4,kernel=3,every=None")

WINDOW, KERNEL, MIX, THRESHOLD = 4, 3, 0.4, 0.35


class Head:
    """One kv head with its query heads: the keys it holds and every query so far, by position."""

    def __init__(self, budget, every):
        self.budget, self.every = budget, every
        self.keys, self.queries = {}, {}
        self.closest = np.inf

    def see(self, position, q, k):
        self.keys[position], self.queries[position] = rotated(k, position, 1e4), rotated(q, position, 1e4)

    def scores(self, now):
        """Z by position, for the tokens older than the window."""
        held = sorted(self.keys)
        distant = [p for p in held if p < now - WINDOW]
        keys = np.stack([self.keys[p] for p in distant])
        window = [self.queries[p] for p in range(max(0, now - WINDOW), now)]
        weights = [softmax((q @ keys.T / np.sqrt(keys.shape[-1])).max(axis=0)) for q in window]
        importance = np.mean(weights, axis=0)
        side = KERNEL // 2
        pooled = [importance[max(0, i - side) : i + side + 1].max() for i in range(len(distant))]
        redundant = dict(zip(held, repeated(np.stack([self.keys[p] for p in held]), THRESHOLD), strict=True))
        return {p: MIX * i - (1 - MIX) * redundant[p] for p, i in zip(distant, pooled, strict=True)}

    def evict(self, now, count):
        if count > 0:
            scores = self.scores(now)
            ranked = sorted(scores, key=lambda p: scores[p])
            if count < len(ranked):
                self.closest = min(self.closest, scores[ranked[count]] - scores[ranked[count - 1]])
            for p in ranked[:count]:
                del self.keys[p]


def repeated(keys, threshold):
    """R of keys in order of position: of the keys similar to a key, the latest is exempt."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, 0)
    for row in cosines:
        similar = np.flatnonzero(row > threshold)
        if len(similar):
            row[similar[-1]] = 0
    return softmax(cosines.mean(axis=0))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(3, 5), (1, 1)])
def test_retains_what_the_equations_retain(group, every):
    """Prompts longer and shorter than the budget, shorter than the window; 14 steps with slots in any order."""
    heads, size, steps, lengths = 2, 30, 14, np.array([30, 17, 3])
    options = f"window={WINDOW},kernel={KERNEL},mix={MIX},threshold={THRESHOLD},every={every}"
    policy = parse(f"rkv:budget=16,{options}")
    q, k, v = one_layer.random_streams(group, 3, heads, group, size + steps)
    k = np.round(k)  # keys that resemble each other
    literal = [[Head(16, every) for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-6


def test_redundancy_is_the_equation_in_any_order_of_slots_and_in_blocks():
    """More keys than a block has, empty slots among them, in two heads."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(1, 2, 300, 4)).astype(np.float32)
    positions = np.full((1, 2, 300), -1)
    for head in range(2):
        positions[0, head, rng.permutation(300)[:260]] = rng.permutation(400)[:260]
    entries = Slots(jnp.asarray(keys), jnp.asarray(keys), jnp.asarray(positions), jnp.full((1, 2), 300))
    ours = np.asarray(jax.jit(redundancy, static_argnums=1)(entries, 0.8))
    for head in range(2):
        order = np.argsort(positions[0, head])[40:]
        expected = repeated(keys[0, head, order].astype(np.float64), 0.8)
        np.testing.assert_allclose(ours[0, head, order], expected, rtol=1e-4)
        assert (ours[0, head][positions[0, head] < 0] == 0).all()


def test_a_short_turn_scores_by_the_queries_that_there_are():
    """The queries of a prompt that has been read are forgotten. Of the window of 4, a turn of one token fills one."""
    rng = np.random.default_rng(1)
    keys, query = rng.normal(size=(1, 8, 4)), rng.normal(size=(2, 4))
    queries = np.ones((1, 2, 4, 4), np.float32)
    queries[0, :, 3] = query
    ring = QueryRing(jnp.asarray(queries), jnp.zeros((1, 2, 4)), jnp.array([[[-1, -1, -1, 7]]]))
    entries = replace(one_layer.entries_at([[*range(8)]], keys), per_row=ring)
    score = JointImportance(4, Pooling("max", 1), 1.0, 1.0)
    found = jax.jit(lambda entries: score(entries, one_layer.moment(8, heads=2)))(entries)
    expected = softmax((query @ keys[0, :4].T / 2).max(axis=0))
    np.testing.assert_allclose(found[0, 0, :4], expected, rtol=1e-5)


def test_of_equal_keys_the_latest_stays():
    """Three tokens share a key and two have keys of their own: with mix=0 the shared key's early copies leave first."""
    keys = np.eye(8, dtype=np.float32)[[0, 0, 1, 0, 2]][None, None]
    entries = Slots(keys, keys, np.arange(5)[None, None], np.full((1, 1), 5))
    scores = np.asarray(redundancy(entries, 0.5))[0, 0]
    # s(i, c) is 1 for the pairs of tokens 0, 1 and 3; the latest similar one of 0 and of 1 is 3, of 3 it is 1.
    means = np.array([2, 1, 0, 0, 0]) / 5
    np.testing.assert_allclose(scores, np.exp(means) / np.exp(means).sum(), rtol=1e-6)


@pytest.mark.slow
def test_a_step_leaves_the_buffer_s_room():
    """The paper's B_budget is the budget less `every`: a full head evicts that many at once."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "rkv:budget=20,window=2,every=8", [np.arange(20)], 24)
    sizes = []
    for i in range(9):
        _, cache = tiny.step(params, cache, np.array([i]), np.array([True]))
        sizes.append({len(head) for head in tiny.held(cache, 0)[0]})
    assert sizes == [{n} for n in (13, 14, 15, 16, 17, 18, 19, 20, 13)]
