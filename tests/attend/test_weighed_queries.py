"""Attention received from queries that count for different weights, and another score's value while observing.

The literal form is dense attention in NumPy, row by row: prompts of different lengths, then steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Score
from kvjax.parts import (
    Drop,
    Fixed,
    KeyNorm,
    LayerShape,
    Moment,
    Needs,
    Protect,
    Received,
    Reduction,
    TopTokens,
    WindowAttention,
)
from kvjax.policy import Policy
from tests import dense, tiny
from tests.methods import one_layer

LENGTHS, PROMPT, STEPS, HEADS, GROUP = np.array([9, 1, 5]), 9, 3, 2, 3
DECAY = 0.8


def by_age(attended):
    """A query counts `DECAY` times as much as the next one of its call."""
    age = attended.positions[:, -1:] - attended.positions
    return DECAY ** jnp.where(attended.positions >= 0, age, 0)


def alternate(attended):
    """Queries at odd positions do not count."""
    return (attended.positions % 2 == 0).astype(jnp.float32)


def by_norm(attended):
    """The mean norm of the token's queries, which rotation does not change."""
    return jnp.mean(jnp.linalg.norm(attended.queries.astype(jnp.float32), axis=-1), axis=1)


@dataclass(frozen=True)
class Weighed(Score):
    """The sum over calls of the attention that an entry received from weighed queries."""

    wish: Received = field(default=Received(Reduction()))

    @property
    def needs(self):
        return Needs(received=self.wish, slotwise=True)

    def init(self, shape: LayerShape):
        return jnp.zeros((shape.batch, shape.kv_heads, shape.slots), jnp.float32), None

    def observe(self, entries, attended):
        return entries.per_slot + attended.received, None

    def __call__(self, entries, moment):
        return entries.per_slot


def literal(weights, counted, wish):
    """The weights [G, W, M] of the queries of a call, reduced: rows first or the group first."""
    weights = weights * counted[None, :, None]
    weights = weights[:, -wish.last :] if wish.last else weights
    seen = np.maximum(weights_seen(weights).sum(axis=0), 1)
    folds = {"sum": np.sum, "mean": np.mean, "max": np.max}

    def rows(x, axis):
        return np.sum(x, axis=axis) / seen if wish.reduction.rows == "mean" else folds[wish.reduction.rows](x, axis)

    if wish.reduction.first == "group":
        return rows(folds[wish.reduction.group](weights, axis=0), 0)
    return folds[wish.reduction.group](rows(weights, 1), axis=0)


def weights_seen(weights):
    """Whether each query of [W, M] sees a key: the newest of the keys are the queries' own."""
    W, M = weights.shape[1:]
    return np.arange(M) <= np.arange(M - W, M)[:, None]


def dense_weights(q, k, positions):
    """The softmax weights [G, W, M] of the last W of M tokens of one row and head."""
    own = positions[-q.shape[1] :]
    return dense.attention(q[None], k[None, None], own[None], positions[None, None], q.shape[-1] ** -0.5)[0][0]


WISHES = [
    Received(Reduction(rows="sum", group="mean"), weigh=by_age),
    Received(Reduction(rows="sum", group="max", first="group"), weigh=by_age),
    Received(Reduction(rows="max", group="sum"), last=4, weigh=by_norm),
    Received(Reduction(rows="mean", group="mean"), weigh=by_norm),
    Received(Reduction(rows="max", group="max"), weigh=alternate),
]


@pytest.mark.long(first=1)
@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: f"{wish.reduction.rows}-{wish.reduction.group}")
def test_weighed_queries_in_prompts_and_steps(wish):
    rows, tokens = len(LENGTHS), PROMPT + STEPS
    q, k, v = one_layer.random_streams(1, rows, HEADS, GROUP, tokens)
    policy = Policy(Weighed(wish), Fixed(PROMPT + STEPS), TopTokens(), Drop(), Protect(), every=1)
    _, entries = one_layer.read(policy, LENGTHS, PROMPT, q, k, v)
    for t in range(STEPS):
        at = slice(PROMPT + t, PROMPT + t + 1)
        _, entries = one_layer.step(policy, LENGTHS + t, entries, q[:, :, at], k[:, :, at], v[:, :, at])
    layer = entries[0]
    for row, h in np.ndindex(rows, HEADS):
        own = slice(PROMPT - LENGTHS[row], None)
        queries, keys = q[row, h * GROUP : (h + 1) * GROUP, own], k[row, h, own]
        expected = np.zeros(keys.shape[0])
        ends = LENGTHS[row] + np.arange(STEPS + 1)
        for start, end in zip((0, *ends), ends, strict=False):
            positions = np.arange(end)
            rotated = [one_layer_rotated(x, positions) for x in (queries[:, :end], keys[:end])]
            weights = dense_weights(rotated[0][:, start:end], rotated[1], positions)
            counted = counts(wish.weigh, q[row, :, own][:, start:end], np.arange(start, end))
            expected[:end] += literal(weights, counted, wish)
        places = np.asarray(layer.positions[row, h])
        found = np.asarray(layer.per_slot[row, h])[np.argsort(places)][(places < 0).sum() :]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def counts(weigh, queries, positions):
    """What the functions above say, in NumPy."""
    if weigh is by_age:
        return DECAY ** (positions[-1] - positions).astype(float)
    if weigh is alternate:
        return (positions % 2 == 0).astype(float)
    return np.linalg.norm(queries, axis=-1).mean(axis=0)


def one_layer_rotated(x, positions):
    """Queries or keys [..., N, D] at their positions, by the halves of RoPE."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 1e4 ** (-np.arange(half) / half)
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.long
def test_rows_without_weights_give_nothing_and_weights_of_one_change_nothing():
    q, k, v = one_layer.random_streams(2, len(LENGTHS), HEADS, GROUP, PROMPT)

    def received(weigh):
        wish = Received(Reduction(), weigh=weigh)
        policy = Policy(Weighed(wish), Fixed(PROMPT), TopTokens(), Drop(), Protect(), every=1)
        return np.asarray(one_layer.read(policy, LENGTHS, PROMPT, q, k, v)[1][0].per_slot)

    plain, ones = received(None), received(lambda attended: jnp.ones(attended.positions.shape))
    np.testing.assert_allclose(ones, plain, rtol=1e-5, atol=1e-6)
    assert not received(lambda attended: jnp.zeros(attended.positions.shape)).any()


@dataclass(frozen=True)
class Noted(Score):
    """The value that another score had when queries last attended."""

    base: Score

    @property
    def needs(self):
        return replace(self.base.needs, slotwise=False)

    def init(self, shape: LayerShape):
        return jnp.zeros((shape.batch, shape.kv_heads, shape.slots), jnp.float32), self.base.init(shape)[1]

    def observe(self, entries, attended):
        base = replace(entries, per_slot=None)
        base = replace(base, per_row=self.base.observe(base, attended)[1])
        now = attended.lengths[:, None, None] > 0
        return jnp.where(now, self.base(base, attended.moment()), entries.per_slot), base.per_row

    def __call__(self, entries, moment):
        return entries.per_slot


@pytest.mark.parametrize("base", [KeyNorm(), WindowAttention(3, Reduction(rows="mean", group="max", first="group"))])
def test_another_score_is_asked_while_observing(base):
    """Its value is what it is when entries are scored right after."""
    q, k, v = one_layer.random_streams(3, len(LENGTHS), HEADS, GROUP, PROMPT)
    policy = Policy(base, Fixed(PROMPT), TopTokens(), Drop(), Protect(recent=3), every=1)
    scored = partial(one_layer.scores, lengths=LENGTHS, prompt=PROMPT, q=q, k=k, v=v)
    np.testing.assert_array_equal(scored(replace(policy, score=Noted(base))), scored(policy))


@pytest.mark.long
def test_the_moment_of_what_is_observed():
    shown = []

    @dataclass(frozen=True)
    class Asking(Score):
        """Shows the moments."""

        def init(self, shape):
            return jnp.zeros((shape.batch, shape.kv_heads, shape.slots)), None

        def observe(self, entries, attended):
            shown.append((attended, attended.moment()))
            return entries.per_slot, None

        def __call__(self, entries, moment):
            return entries.per_slot

    q, k, v = one_layer.random_streams(4, len(LENGTHS), HEADS, GROUP, PROMPT)
    policy = Policy(Asking(), Fixed(PROMPT), TopTokens(), Drop(), Protect(), every=1)
    one_layer.read.__wrapped__(policy, LENGTHS, PROMPT, q, k, v)
    ((attended, moment),) = shown
    assert isinstance(moment, Moment)
    assert moment.next_position.tolist() == LENGTHS.tolist()
    assert (moment.layer, moment.heads) == (attended.layer, attended.heads)
    assert moment.protected is None
    assert moment.counts is None


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_devices_that_share_a_kv_head_weigh_queries_alike():
    """Each has some query heads of a kv head, and all have the positions that weights follow from."""
    params = tiny.decoder(8, 2)
    rows = [np.random.default_rng(5).integers(0, tiny.VOCAB, n) for n in (9, 4, 7, 9)]
    wish = Received(Reduction(rows="sum", group="max", first="group"), weigh=by_age)
    policy = Policy(Weighed(wish), Fixed(6), TopTokens(), Drop(), Protect(recent=1), every=1)
    on_mesh = kvjax.shard(params, kvjax.make_mesh(data=2, model=4))
    one, many = (kvjax.generate(p, rows, policy=policy, max_new_tokens=6) for p in (params, on_mesh))
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_array_equal(many.cache.entries[0].positions, one.cache.entries[0].positions)
