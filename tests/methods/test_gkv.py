"""G-KV against its equations in float64 NumPy, one head of one text at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import extend
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax
from tests.methods.test_rkv import repeated

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=3,every=3", "budget=0.5,window=4,mix=1.0,every=None")

WINDOW, DECAY, MIX, THRESHOLD, BUDGET = 4, 0.7, 0.6, 0.35, 16


class Head:
    """One kv head with its query heads: the keys it holds, every query's softmax when it attended, and F."""

    def __init__(self):
        self.keys, self.weights, self.lasting, self.closest = {}, {}, {}, np.inf

    def see(self, position, q, k):
        self.keys[position] = rotated(k, position, 1e4)
        queries = rotated(q, position, 1e4)
        weights = softmax(queries @ np.stack(list(self.keys.values())).T / np.sqrt(k.shape[-1])).max(axis=0)
        self.weights[position] = dict(zip(self.keys, weights, strict=True))

    def evict(self, now, count):
        if count <= 0:
            return
        distant = [p for p in self.keys if p < now - WINDOW]
        window = [self.weights[r] for r in range(now - WINDOW, now)]
        local = {p: np.mean([weights.get(p, 0) for weights in window]) for p in distant}
        self.lasting = {p: max(DECAY * self.lasting.get(p, 0), local[p] / max(local.values())) for p in distant}
        held = sorted(self.keys)
        redundant = dict(zip(held, repeated(np.stack([self.keys[p] for p in held]), THRESHOLD), strict=True))
        most = max(redundant[p] for p in distant)
        scores = {p: MIX * self.lasting[p] - (1 - MIX) * redundant[p] / most for p in distant}
        ranked = sorted(scores, key=lambda p: scores[p])
        if count < len(ranked):
            self.closest = min(self.closest, scores[ranked[count]] - scores[ranked[count - 1]])
        for p in ranked[:count]:
            del self.keys[p], self.lasting[p]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(3, 6), (1, 3)])
def test_retains_what_the_equations_retain(group, every):
    """Prompts longer than the budget, between window and budget, shorter than the window; 20 steps."""
    heads, size, steps, lengths = 2, 30, 20, np.array([30, 17, 10, 7, 3])
    options = f"window={WINDOW},decay={DECAY},mix={MIX},threshold={THRESHOLD},every={every}"
    policy = parse(f"gkv:budget={BUDGET},{options}")
    q, k, v = one_layer.random_streams(group, len(lengths), heads, group, size + steps)
    k = np.round(k)  # keys that resemble each other
    literal = [[Head() for _ in range(heads)] for _ in lengths]
    one_layer.assert_follows(policy, literal, lengths, size, q, k, v)
    assert min(head.closest for own in literal for head in own) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 14])
def test_a_prompt_in_pieces(window):
    """Tokens that have left a sliding window between two pieces were not evicted."""
    params, rows = (
        tiny.decoder(windows=(window,)),
        [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11)],
    )
    whole, pieces = (tiny.prefill(params, "gkv:budget=9,window=3,every=2", rows, 32, chunk=n)[1] for n in (None, 7))
    for _ in range(4):
        assert [tiny.held(whole, row) for row in range(2)] == [tiny.held(pieces, row) for row in range(2)]
        whole, pieces = (tiny.step(params, cache, np.arange(2), np.ones(2, bool))[1] for cache in (whole, pieces))


@pytest.mark.long
@pytest.mark.parametrize(("first", "last"), [(10, 16), (17, 19)])
def test_without_an_eviction_it_does_not_matter_how_tokens_are_cut_into_calls(first, last):
    """A prompt of 10 tokens and 20 more, one by one, or some of them at once; evictions are at 16, 20, 24 and 28."""
    params, row = tiny.decoder(), np.random.default_rng(5).integers(0, tiny.VOCAB, 30)

    def begun():
        return tiny.prefill(params, "gkv:budget=16,window=4,every=4,mix=1.0,decay=1.0", [row[:10]], 16, room=24)[1]

    by_step, by_turn = begun(), begun()
    for n, token in enumerate(row[10:], 10):
        _, by_step = tiny.step(params, by_step, token[None], np.ones(1, bool))
        if n == first:
            _, by_turn = extend(params, by_turn, row[None, first:last])
        elif not first < n < last:
            _, by_turn = tiny.step(params, by_turn, token[None], np.ones(1, bool))
        if not first <= n < last - 1:
            assert tiny.held(by_turn, 0) == tiny.held(by_step, 0)
