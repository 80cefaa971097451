"""ReST-KV against the released steps in float64 NumPy, one query head of one row at a time."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.methods.common.window_attention import QueryRing
from kvjax.methods.restkv import LostOutput
from kvjax.models import AttentionLayer, Rope
from kvjax.policies import adakv, parse, restkv
from kvjax.policy import Moment
from tests import tiny
from tests.methods.literal_budgets import adaptive, best
from tests.methods.reference import Reader

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=4,kernel=3", "budget=0.5,window=4,kernel=3,alpha=0.6,reach=2")
SCORES = (LostOutput(4, kernel=3, reach=2),)

ROWS = [np.random.default_rng(5).integers(0, tiny.VOCAB, n) for n in (40, 14, 29, 3)]
WINDOW, BUDGET = 6, 13
REFUSED = {
    "kernel=4": r"^restkv: kernel=4: expected an odd integer >= 1",
    "budget=20,window=20": r"^restkv: ",
}


def moving_average(rows, alpha):
    average = rows[0]
    for row in rows[1:]:
        average = alpha * row + (1 - alpha) * average
    return average


def drift(rows, number, reach):
    """The number of steps of `reach` by which the `number` largest weights of the older rows lie behind the newer."""
    largest = np.argsort(rows, axis=-1, kind="stable")[:, -number:]
    half = len(rows) // 2
    return int((largest[:half].sum() - largest[half:].sum()) / (number * half * reach))


def smoothed(scores, kernel, steps):
    """Average pooling of the scores of a text, off centre by `steps`; the ends are repeated beyond the ends."""
    size = max(kernel, 2 * abs(steps) + 1)
    ends = size // 2 + abs(steps)
    padded = np.pad(scores, ends, mode="edge")
    first = ends - size // 2 + steps
    return np.array([padded[first + c : first + c + size].mean() for c in range(len(scores))])


def scores_of(params, text, alpha, kernel, reach, counts=None):
    """The scores [L, H, N] of a text that a `Reader` has read, +inf for the window; `counts` [L, H] are retained."""
    n = text.length
    weights, values = text.weights(range(n - WINDOW, n), range(n)), text.values()
    L, H, G = weights.shape[:3]
    scores = np.full((L, H, n), np.inf)
    steps = []
    for layer, h in np.ndindex(L, H):
        output = np.asarray(params.attention_layers[layer].output, np.float64)
        old = values[layer, h, : n - WINDOW]
        own = []
        for g in range(G):
            rows = weights[layer, h, g]
            a = moving_average(rows, alpha)[: n - WINDOW]
            lost = a / (1 - a) * np.linalg.norm((a @ old - old) @ output[h * G + g], axis=-1)
            steps.append(0 if counts is None else drift(rows, counts[layer, h] - WINDOW, reach))
            own.append(smoothed(lost, kernel, steps[-1]))
        scores[layer, h, : n - WINDOW] = np.mean(own, axis=0)
    return scores, steps


def of_rows(heads, kv_heads, **options):
    """The decoder, and for each row longer than the budget what `scores_of` returns."""
    params = tiny.decoder(heads, kv_heads, (None,) * 2)
    found = {}
    for b, row in enumerate(ROWS):
        if len(row) > BUDGET:
            text = Reader(params)
            text.read(row)
            found[b] = scores_of(params, text, **options)
    return params, found


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "alpha", "reach"), [(8, 2, 0.3, 2000), (7, 1, 0.3, 2), (4, 4, 0.7, 1), (8, 2, 1.0, 1)]
)
def test_heads_retain_what_the_released_steps_retain(heads, kv_heads, alpha, reach):
    """Ragged rows, prompts shorter than the budget and than the window, with and without drift."""
    counts = np.full((2, kv_heads), BUDGET)
    params, literal = of_rows(heads, kv_heads, alpha=alpha, kernel=3, reach=reach, counts=counts)
    _, cache = tiny.prefill(params, restkv(BUDGET, WINDOW, alpha, 3, reach), ROWS, 48)
    for b, (scores, steps) in literal.items():
        assert tiny.held(cache, b) == best(scores, counts)
        assert any(steps) == (reach < 2000), "some heads drift"
    assert tiny.held(cache, 3) == [[[0, 1, 2]] * kv_heads] * 2


@pytest.mark.parametrize("hidden", [False, True])
def test_scores_of_a_layer(hidden):
    """Two rows, two query heads for each of two kv heads; with the drift that the numbers of entries bring.

    With `hidden` there is a sliding window of 14 tokens, and entries have biases.
    """
    rng, (H, G, W, M, D), lengths = np.random.default_rng(2), (2, 2, 4, 24, 4), (24, 15)
    counts = np.array([[9, 14], [7, 10]])
    q, k, v = (rng.normal(size=(2, heads, n, D)) for heads, n in ((H * G, W), (H, M), (H, M)))
    output, drifts = rng.normal(size=(H * G, D, 6)), set()
    positions = np.maximum(np.arange(M) - (M - np.array(lengths)[:, None]), -1)
    at = np.stack([n - W + np.arange(W) for n in lengths])
    window, bias = 14 if hidden else None, rng.normal(size=(2, H, M)) * hidden
    seen = (positions[:, None] >= 0) & (positions[:, None] <= at[..., None])
    seen &= positions[:, None] > at[..., None] - (window or M)
    logits = np.einsum("bhgrd,bhmd->bhgrm", q.reshape(2, H, G, W, D), k) * 0.5 + bias[:, :, None, None]
    weights = np.where(seen[:, None, None], np.exp(logits), 0)
    sums = weights.sum(axis=-1, keepdims=True)
    layer = AttentionLayer(0, Rope(1e4), window, 0.5, jnp.asarray(output, jnp.float32))
    score = LostOutput(W, alpha=0.4, kernel=3, reach=2)

    @jax.jit
    def scored(q, k, v, lse, counts):
        ring = QueryRing(q, lse, jnp.broadcast_to(at[:, None], (2, H, W)))
        at_slots = jnp.broadcast_to(positions[:, None], k.shape[:3])
        entries = Slots(k, v, at_slots, counts, per_row=ring, bias=jnp.asarray(bias, jnp.float32) if hidden else None)
        return score(entries, Moment(jnp.array(lengths), layer, counts=counts))

    lse = np.log(sums).reshape(2, H * G, W)
    found = np.asarray(scored(*(x.astype(np.float32) for x in (q, k, v, lse)), counts))
    for b, h in np.ndindex(2, H):
        n, own = lengths[b], []
        for g in range(G):
            rows, values = (weights / sums)[b, h, g, :, M - n :], v[b, h, M - n : M - W]
            a = moving_average(rows, 0.4)[: n - W]
            lost = a / (1 - a) * np.linalg.norm((a @ values - values) @ output[h * G + g], axis=-1)
            drifts.add(steps := drift(rows, counts[b, h] - W, 2))
            own.append(smoothed(lost, 3, steps))
        np.testing.assert_allclose(found[b, h, M - n : M - W], np.mean(own, axis=0), rtol=1e-4)
    assert len(drifts) > 1


def test_the_program_does_not_grow_with_the_pooling():
    """With reach=1 a prompt of M slots may pool 2 M neighbours and more."""

    def steps(M):
        shapes = ((1, 1, 1, M), jnp.float32), ((1, 1, M), bool), ((1, 1, 1), jnp.int32)
        pooled = LostOutput(4, kernel=3, reach=1)._pooled
        return len(jax.make_jaxpr(pooled)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).eqns)

    assert steps(160) == steps(40)


def test_a_drift_of_many_entries_over_a_long_reach():
    """Their product, 2^11 * 2 * 2^20, is beyond 32 bits."""
    ring = QueryRing(jnp.ones((1, 1, 4, 2)), jnp.zeros((1, 1, 4)), jnp.array([[[4, 5, 6, 7]]]))
    keys = jnp.ones((1, 1, 8, 2))
    entries = Slots(keys, keys, jnp.arange(8)[None, None], jnp.full((1, 1), 6), per_row=ring)
    moment = Moment(jnp.array([8]), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.eye(2)[None]))
    drift = jax.jit(lambda entries: LostOutput(4, reach=2**20)._drift(entries, moment, jnp.full((1, 1), 2**11)))
    assert not drift(entries).any()


@pytest.mark.slow
def test_heads_compete_before_the_drift_is_known():
    """AdaKV divides by the scores without drift, and each head then fills its number by those with it."""
    params, plain = of_rows(8, 2, alpha=0.3, kernel=3, reach=2)
    _, cache = tiny.prefill(params, adakv(restkv(BUDGET, WINDOW, kernel=3, reach=2)), ROWS, 48)
    for b, (compared, _) in plain.items():
        counts = np.array([adaptive(layer, BUDGET) for layer in compared])
        text = Reader(params)
        text.read(ROWS[b])
        scores, _ = scores_of(params, text, 0.3, 3, 2, counts)
        assert tiny.held(cache, b) == best(scores, counts)


def test_a_weight_of_one_has_finite_odds():
    """Infinity is what protected entries score, and 0 times infinity is not a number."""
    keys = np.zeros((1, 1, 6, 2), np.float32)
    keys[..., 1, 0] = 100
    values = np.arange(12, dtype=np.float32).reshape(keys.shape)
    queries = np.broadcast_to(np.float32([1, 0]), (1, 1, 2, 2))
    ring = QueryRing(jnp.asarray(queries), jnp.full((1, 1, 2), 100.0), jnp.array([[[4, 5]]]))
    entries = Slots(
        jnp.asarray(keys), jnp.asarray(values), jnp.arange(6)[None, None], jnp.full((1, 1), 4), per_row=ring
    )
    layer = AttentionLayer(0, Rope(1e4), None, 1.0, jnp.eye(2)[None])
    moment = Moment(jnp.array([6]), layer, counts=entries.capacity)
    scores = np.asarray(jax.jit(lambda entries: LostOutput(2, kernel=1)(entries, moment))(entries))[0, 0]
    assert np.isfinite(scores).all()
    assert scores[1] > 0
    assert not np.delete(scores, 1).any()


def test_refusals():
    made = restkv(12, 4)
    with pytest.raises(
        ValueError, match=r"LostOutput: its pooling needs entries in order of position, and every=2 overwrites"
    ):
        replace(made, every=2)
    for option, error in REFUSED.items():
        with pytest.raises(ValueError, match=error):
            parse(f"restkv:{option}")
