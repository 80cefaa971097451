"""MorphKV where layers and heads compete for the budget: a decoder of literal heads, each with its own number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.parts import AdaptiveShares, CompositeShares, DynamicShares, Fixed, GlobalShares
from kvjax.policies import morphkv
from tests import tiny
from tests.dense import assert_close
from tests.methods.literal_budgets import adaptive, algorithm_1
from tests.methods.reference import Reader

SIZE, LAYERS, HEADS, BUDGET, WINDOW, STEPS = 32, 2, 2, 12, 4, 8
RNG = np.random.default_rng(6)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (30, 9, 19)]  # the second grows into its budget
ANSWER = RNG.integers(0, tiny.VOCAB, (STEPS, len(ROWS)))


def counts(importance: np.ndarray, budget) -> np.ndarray:
    """Entries [L, H] beside the window: `every` = 1 for each, and what the scores [L, H, N'] say of the others."""
    ranked = -np.sort(-importance, axis=-1)
    base = BUDGET - WINDOW
    match budget:
        case DynamicShares():
            kept = algorithm_1(importance, base - 1, budget.interval, budget.r_max)
            return np.array([[1 + len(own) for own in layer] for layer in kept])
        case AdaptiveShares():
            window = np.full((LAYERS, HEADS, WINDOW), np.inf)
            scores = np.concatenate([importance, window], axis=-1)
            return np.array([adaptive(own, BUDGET, least=WINDOW + 1) for own in scores]) - WINDOW
        case CompositeShares():
            ranked = ranked.mean(axis=1, keepdims=True)
    ranked[..., 0] = np.inf
    top = np.argsort(-ranked, axis=None, kind="stable")[: base * LAYERS * ranked.shape[1]]
    found = np.zeros(ranked.shape[:2], int)
    np.add.at(found, np.unravel_index(top, ranked.shape)[:2], 1)
    return np.broadcast_to(found, (LAYERS, HEADS))


def compress(text: Reader, budget) -> None:
    """At the prompt's end: each head's own budget, and what it keeps by it."""
    n = text.length
    if n <= BUDGET:
        own = np.full((LAYERS, HEADS), BUDGET)
    else:
        importance = np.zeros((LAYERS, HEADS, n - WINDOW))
        for (i, h), _ in np.ndenumerate(importance[..., 0]):
            ranked, scores = text.heads[i][h].ranked(n)
            importance[i, h, ranked] = scores
        own = counts(importance, budget) + WINDOW
    for (i, h), capacity in np.ndenumerate(own):
        head = text.heads[i][h]
        head.budget = int(capacity)
        if n > capacity:
            head.keep(n, int(capacity) - WINDOW)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "budget",
    [
        CompositeShares(Fixed(BUDGET)),
        DynamicShares(Fixed(BUDGET), interval=2),
        GlobalShares(Fixed(BUDGET)),
        AdaptiveShares(Fixed(BUDGET)),
    ],
    ids=["kvcompose", "dynamickv", "heads", "adakv"],
)
def test_the_cache_is_constant_and_holds_what_literal_heads_hold(budget) -> None:
    params = tiny.decoder(8, HEADS, (None,) * LAYERS)
    policy = replace(morphkv(BUDGET, window=WINDOW, block=2), budget=budget)
    logits, cache = tiny.prefill(params, policy, ROWS, SIZE)
    texts = [Reader(params, window=WINDOW) for _ in ROWS]
    for b, (text, row) in enumerate(zip(texts, ROWS, strict=True)):
        assert_close(logits[b], text.read(row))
        compress(text, budget)
    capacity, size = np.stack(cache.entries.capacity, axis=-1), cache.nbytes
    assert len(np.unique(capacity)) > 1, "or layers and heads did not compete"
    for token in ANSWER:
        for b, text in enumerate(texts):
            assert tiny.held(cache, b) == text.held()
        logits, cache = tiny.step(params, cache, token, np.ones(len(ROWS), bool))
        assert cache.nbytes == size
        for b, text in enumerate(texts):
            assert_close(logits[b], text.read(token[b : b + 1], evict=True))
    for b, text in enumerate(texts):
        held = tiny.held(cache, b)
        assert held == text.held()
        full = np.array([[len(head) for head in layer] for layer in held])
        np.testing.assert_array_equal(full, capacity[b].T)
