"""CapKV against its equations in float64 NumPy; tests/methods/test_kvpress.py has kvpress's selections."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,sinks=2,future=8",)

TAU, SINKS, FUTURE = 3.0, 2, 5


def capacity(q, k, v):
    """The scores of one kv head [N]; q [G, N, D] and k [N, D] are not rotated yet."""
    N, D = k.shape
    keys = np.stack([rotated(x, p, 1e4) for p, x in enumerate(k)])[SINKS:]
    values, total = np.asarray(v[SINKS:], np.float64), 0
    for queries in q:
        mean = queries[SINKS:].mean(axis=0)
        anchor = np.mean([rotated(mean, N + t, 1e4) for t in range(FUTURE)], axis=0)
        cosine = keys @ anchor / np.linalg.norm(keys, axis=1) / np.linalg.norm(anchor)
        w = np.exp(TAU * (cosine - cosine.max()))
        inverse = np.linalg.inv(np.eye(D) + (values * w[:, None]).T @ values)
        total = total + w * np.einsum("nd,de,ne->n", values, inverse, values)
    return np.concatenate([np.full(SINKS, np.inf), total])


def test_retains_what_the_equations_retain():
    """Rows of different lengths, one shorter than the sinks, three query heads for each of two kv heads."""
    heads, group, size, lengths = 2, 3, 30, np.array([30, 17, 1])
    policy = parse(f"capkv:budget=9,tau={TAU},sinks={SINKS},future={FUTURE}")
    q, k, v = one_layer.random_streams(4, 3, heads, group, size)
    _, entries = one_layer.read(policy, lengths, size, q, k, v)
    for row, length in enumerate(lengths[:2]):
        for head, held in enumerate(one_layer.held(entries, row)):
            own = slice(head * group, (head + 1) * group)
            scores = capacity(
                q[row, own, size - length :], k[row, head, size - length :], v[row, head, size - length :]
            )
            assert held == sorted(np.argsort(-scores)[:9].tolist())
    assert one_layer.held(entries, 2) == [[0], [0]]


@pytest.mark.slow
def test_a_prompt_in_chunks():
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11)]
    whole, chunked = (tiny.prefill(params, "capkv:budget=9,future=5", rows, 32, chunk=chunk)[1] for chunk in (None, 7))
    assert [tiny.held(whole, row) for row in range(2)] == [tiny.held(chunked, row) for row in range(2)]
