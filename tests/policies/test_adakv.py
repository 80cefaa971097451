"""AdaKV's counts against the formulas in plain Python, and against its worked example."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.heads import ALL_HEADS
from kvjax.parts import AdaptiveShares, Fixed
from kvjax.policies import adakv, h2o, knorm, pyramidkv, snapkv
from tests import tiny

E1 = [[0.30, 0.25, 0.20, 0.10, 0.05, 0.04, 0.03, 0.03], [0.15, 0.14, 0.13, 0.13, 0.12, 0.12, 0.11, 0.10]]


@pytest.mark.parametrize(
    ("formula", "normalise", "alpha", "counts"),
    [
        ("code", False, 0.2, [3, 7]),
        ("code", True, 0.2, [4, 6]),
        ("code", False, 0.5, [4, 6]),
        ("code", True, 0.5, [4, 5]),
        ("paper", False, 0.2, [3, 7]),
        ("paper", True, 0.2, [4, 6]),
        ("paper", True, 0.5, [5, 5]),
        ("paper", False, 0.0, [3, 7]),
        ("paper", True, 1.0, [5, 5]),
        ("kvpress", False, 0.5, [3, 7]),
        ("kvpress", False, 0.8, [4, 6]),
    ],
)
def test_e1(formula, normalise, alpha, counts):
    budget = AdaptiveShares(Fixed(5), alpha, normalise, formula)
    shared = budget.share(jnp.array(E1)[None, None], jnp.array([5]), 0, ALL_HEADS)
    assert shared[0, 0].tolist() == counts


def literal(scores, n, least, alpha, normalise, formula):
    """Counts of the heads of one group, whose scores [H, M] are inf where protected and -inf where there is none."""
    H = len(scores)
    part = Fraction(alpha).limit_denominator(1000)
    weight = [1.0] * H
    free = [sorted((x for x in head if np.isfinite(x)), reverse=True) for head in scores]
    s = [sum(x == np.inf for x in head) for head in scores]
    b = [n - own for own in s]
    if normalise:
        weight = [np.float32(sum(head[:best])) / np.float32(sum(head)) for head, best in zip(free, b, strict=True)]
    safe = max(least, max(1, int(n * part)) if formula == "kvpress" and alpha else 0)
    entries = []
    for h in range(H):
        order = sorted((x for x in scores[h] if x > -np.inf), reverse=True)
        entries += [(np.inf if i < safe else np.float32(x * weight[h]), h, i) for i, x in enumerate(order)]
    if formula == "kvpress":
        best = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: H * n]
        return [sum(h == own for _, own, _ in best) for h in range(H)]
    entries = [entry for entry in entries if entry[2] >= s[entry[1]]]
    best = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: sum(b)]
    c = [sum(h == own for _, own, _ in best) for h in range(H)]
    if formula == "code":
        return [s[h] + round((1 - part) * c[h] + int(part * b[h])) for h in range(H)]
    wanted = [part * b[h] + (1 - part) * c[h] for h in range(H)]
    counts = [int(x) for x in wanted]
    last = sorted(range(H), key=lambda h: (counts[h] - wanted[h], h))
    for h in last[: int(sum(wanted)) - sum(counts)]:
        counts[h] += 1
    return [s[h] + counts[h] for h in range(H)]


@pytest.mark.parametrize("formula", ["paper", "code", "kvpress"])
@pytest.mark.parametrize(
    ("alpha", "normalise", "least", "groups"), [(0.2, True, 0, 1), (0.35, False, 9, 2), (0, True, 0, 2)]
)
def test_counts_are_the_formula(formula, alpha, normalise, least, groups):
    rng = np.random.default_rng(len(formula))
    L, B, H, M = 2, 3, 4, 40
    scores = (rng.gamma(0.3, size=(L, B, H, M)) * rng.gamma(1.0, size=(L, B, H, 1))).astype(np.float32)
    lengths, mean = np.array([40, 25, 6]), np.array([14, 11, 14])
    for b, length in enumerate(lengths):
        scores[:, b, :, : M - length] = -np.inf
        scores[:, b, :, max(M - length, M - 5) :] = np.inf
    budget = AdaptiveShares(Fixed(14), alpha, normalise, formula, groups)
    counts = np.asarray(budget.share(jnp.array(scores), jnp.array(mean), least, ALL_HEADS))
    for layer, b in np.ndindex(L, B):
        for first in range(0, H, H // groups):
            own = slice(first, first + H // groups)
            got = np.minimum(counts[layer, b, own], lengths[b])
            expected = np.minimum(literal(scores[layer, b, own], mean[b], least, alpha, normalise, formula), lengths[b])
            np.testing.assert_array_equal(got, expected)
            over = got.sum() - H // groups * min(mean[b], lengths[b])
            assert over == 0 or (formula == "code" and -1.5 * H // groups <= over <= H // groups / 2)
            assert got.min() >= min(least, lengths[b])
    assert len(np.unique(counts[:, 0])) > 2, "or nothing would have been shared out"


def test_rounded_up_in_every_head_there_is_room():
    """As released, three heads of four may each get half an entry more than their share."""
    budget = AdaptiveShares(Fixed(15), 0.2, False, "code")
    scores = np.full((1, 1, 4, 40), 1.0, np.float32)
    scores[0, 0, :3, :17] = 2
    scores[0, 0, 3, :9] = 2
    counts = budget.share(jnp.array(scores), jnp.array([15]), 0, ALL_HEADS)[0, 0]
    assert counts.tolist() == [17, 17, 17, 10]
    assert budget.entries([15], heads=4) >= sum(counts.tolist()) == 61


def test_heads_keep_their_own_best():
    """What heads of an evicting base hold stays with them: the layer's total is that of equal shares, at every step."""
    params, rng = tiny.decoder(8, 4, (None, None)), np.random.default_rng(2)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (30, 7)]
    _, cache = tiny.prefill(params, adakv(h2o(12, recent=2)), rows, 32)
    before = [[len(head) for head in layer] for layer in tiny.held(cache, 0)]
    assert [sum(layer) for layer in before] == [48, 48]
    assert len(set(before[0])) > 1
    for token in rng.integers(0, tiny.VOCAB, (8, 2)):
        _, cache = tiny.step(params, cache, token, np.ones(2, bool))
        assert [[len(head) for head in layer] for layer in tiny.held(cache, 0)] == before
    assert [[len(head) for head in layer] for layer in tiny.held(cache, 1)] == [[12] * 4] * 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: adakv(alpha=1.5), "alpha=1.5: accepted is a number from 0 to 1"),
        (lambda: adakv(formula="ours"), "formula='ours': accepted are"),
        (lambda: adakv(pyramidkv()), "Pyramid.* under AdaptiveShares"),
        (lambda: adakv(adakv()), "AdaptiveShares.* under AdaptiveShares"),
        (lambda: adakv(knorm(64)), "KeyNorm may be negative; accepted with it is normalise=False"),
        (lambda: adakv(policies.full()), "Everything.* under AdaptiveShares"),
        (lambda: adakv(policies.tova(64)), "LastAttention has all heads .*AdaptiveShares"),
        (lambda: tiny.empty(tiny.decoder(8, 4), adakv(snapkv(64), groups=3), np.ones(1), 8), "groups=3 of 4 kv heads"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
