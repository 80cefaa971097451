"""Attention Matching against least squares in float64 NumPy, and what it brings on the queries that it fits."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.policies import parse
from kvjax.policy import Attended, LayerShape
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "base=snapkv,base.budget=12,base.window=4,base.kernel=3,queries=6",
    "base=knorm,base.budget=12,base.every=2,queries=30,merge.bias=False",
)

HEADS, GROUP, SIZE, BUDGET, RIDGE = 2, 3, 30, 9, 1e-3
LENGTHS = np.array([30, 17, 5])


def ridge(x, y, unit):
    """Least squares with rows that hold the solution near zero."""
    weight = np.sqrt(unit * (x**2).sum() / max((x**2).any(axis=0).sum(), 1))
    return np.linalg.lstsq(np.vstack([x, weight * np.eye(x.shape[1])]), np.vstack([y, 0 * x.T @ y]), rcond=None)[0]


def fitted(q, k, v, kept, free, bias=True):
    """Biases and values of the retained entries of a head; q [n, D] at the next position, k rotated."""
    weights = np.exp(q @ k.T / np.sqrt(k.shape[1]))
    weights /= weights.max(axis=1, keepdims=True)
    own, w = weights[:, kept], np.ones(len(kept))
    if bias:
        missing = weights.sum(axis=1) - own.sum(axis=1)
        w[free] = np.clip(1 + ridge(own[:, free], missing[:, None], RIDGE)[:, 0], np.exp(-3), np.exp(3))
    shares = own * w / (own * w).sum(axis=1, keepdims=True)
    values = v[kept].astype(np.float64)
    missing = weights @ v / weights.sum(axis=1, keepdims=True) - shares @ values
    values[free] += ridge(shares[:, free], missing, RIDGE)
    return np.log(w), values


def lots(length, seed=0):
    """The positions of a row, in the order in which a sample takes them."""
    drawn = [float(jax.random.uniform(jax.random.fold_in(jax.random.key(seed), p))) for p in range(length)]
    return sorted(range(length), key=lambda p: -drawn[p])


def read(spec, asked=None):
    """Entries that were read, and queries, keys and values of each head; of the sample's `asked` queries, or all."""
    q, k, v = one_layer.random_streams(4, 3, HEADS, GROUP, SIZE)
    _, entries = one_layer.read(parse(spec), LENGTHS, SIZE, q, k, v)
    for row, length in enumerate(LENGTHS):
        text = slice(SIZE - length, None)
        for head in range(HEADS):
            own = slice(head * GROUP, (head + 1) * GROUP)
            keys = np.stack([rotated(x, p, 1e4) for p, x in enumerate(k[row, head, text])])
            queries = np.stack(
                [rotated(x, length, 1e4) for x in q[row, own, text][:, lots(length)[:asked]].reshape(-1, 8)]
            )
            yield entries[0], row, head, queries, keys, v[row, head, text].astype(np.float64)


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(("bias", "queries", "atol"), [(True, 64, 1e-5), (True, 2, 2e-4), (False, 64, 1e-5)])
def test_biases_and_values_are_the_ridge_solutions(bias, queries, atol):
    """A sink and three recent tokens stay as they are, and so does the row that fits into the budget.

    With fewer queries than entries, the solution is a product with a vector of larger numbers.
    """
    base = f"base=knorm,base.budget={BUDGET},base.sinks=1,base.recent=3"
    merge = f"merge.bias={bias},merge.ridge={RIDGE}"
    for entries, row, head, q, k, v in read(f"attention_matching:{base},queries={queries},{merge}", queries):
        positions = np.asarray(entries.positions[row, head])
        order = np.argsort(positions)[(positions < 0).sum() :]
        kept, found = positions[order], np.asarray(entries.values[row, head])[order]
        biases, values = np.zeros(len(kept)), v[kept]
        if len(k) > BUDGET:
            biases, values = fitted(q, k, v, kept, (kept >= 1) & (kept < len(k) - 3), bias)
            assert np.abs(values - v[kept]).max() > 0.1
        np.testing.assert_allclose(np.asarray(entries.bias[row, head])[order], biases, atol=atol)
        np.testing.assert_allclose(found, values, atol=atol)


@pytest.mark.slow
def test_the_fit_is_nearer_to_full_attention():
    """Squared errors on the queries that were fitted: of the output, and of the sum of exponents, relative."""
    errors = []
    fitted = f"attention_matching:base=knorm,base.budget={BUDGET},merge.ridge={RIDGE}"
    fits = [f"{fitted},merge.bias={bias}" for bias in (False, True)]
    for spec in (f"knorm:budget={BUDGET}", *fits):
        outputs = masses = 0
        for entries, row, head, q, k, v in read(spec):
            held = np.asarray(entries.positions[row, head]) >= 0
            bias = 0 if entries.bias is None else np.asarray(entries.bias[row, head])[held]
            own = np.exp(q @ np.asarray(entries.keys[row, head], np.float64)[held].T / np.sqrt(8) + bias)
            full = np.exp(q @ k.T / np.sqrt(8))
            masses += ((own.sum(1) - full.sum(1)) ** 2 / full.max(1) ** 2).sum()
            apart = softmax(np.log(own)) @ np.asarray(entries.values[row, head])[held] - softmax(np.log(full)) @ v
            outputs += (apart**2).sum()
        errors.append((outputs, masses))
    plain, values, both = errors
    assert max(values[0], both[0]) < plain[0] / 2
    assert both[1] < values[1] / 2


def test_a_sample_has_the_largest_lots_in_any_pieces():
    """Of a row of 20 tokens, and of one of 3, which has fewer than the sample; pieces of 7, 1 and 12 columns."""
    score, lengths = parse("attention_matching:base=knorm,queries=5,seed=3").score, np.array([20, 3])
    q = np.random.default_rng(0).normal(size=(2, 6, 20, 4)).astype(np.float32)
    positions = np.maximum(np.arange(20) - (20 - lengths[:, None]), -1)
    shape = LayerShape(2, 6, 2, 4, jnp.dtype("float32"), 8)
    layer = one_layer.moment(0, heads=6).layer

    @jax.jit
    def sampled(q):
        nothing = jnp.zeros((2, 2, 0, 4))
        _, state = score.init(shape)
        for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
            entries = Slots(nothing, nothing, nothing[..., 0], jnp.zeros((2, 2)), None, state)
            at = positions[:, part]
            given = q[:, :, part], at, jnp.zeros((2, 6, at.shape[1])), None, jnp.sum(at >= 0, axis=1), layer
            _, state = score.observe(entries, Attended(*given))
        return state.sample

    found = jax.tree.map(np.asarray, sampled(q))
    for row, length in enumerate(lengths):
        largest = lots(length, seed=3)[:5]
        for head in range(2):
            assert found.positions[row, head].tolist() == largest + [-1] * (5 - len(largest))
        for i, p in enumerate(largest):
            np.testing.assert_array_equal(found.queries[row, :, i], q[row, :, 20 - length + p])


@pytest.mark.slow
def test_a_sample_does_not_depend_on_pieces():
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11)]
    spec = "attention_matching:base=knorm,base.budget=9,queries=4"
    whole, pieces = (tiny.prefill(params, spec, rows, 32, chunk=size) for size in (None, 7))
    np.testing.assert_allclose(whole[1].entries[0].bias, pieces[1].entries[0].bias, atol=1e-3)
    np.testing.assert_allclose(whole[1].entries[0].values, pieces[1].entries[0].values, atol=2e-3)


def test_a_fit_needs_a_sample():
    policy = parse("attention_matching")
    with pytest.raises(ValueError, match=r"FittedEntries: it asks a sample .* the score WindowAttention takes none"):
        replace(policy, score=policy.score.base)
