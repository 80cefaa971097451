"""Block-wise selection against a loop in NumPy, over scores that compare entries and scores that do not."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.parts import KeyDifference
from kvjax.policies import parse
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("base=keydiff,base.budget=12,base.sinks=1,base.recent=2,block=5",)


def difference(keys):
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    anchor = unit.mean(axis=0)
    return -unit @ anchor / np.linalg.norm(anchor)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("block", [4, 1, 50])
def test_blocks_compete_with_what_earlier_ones_left(block):
    """Rows longer, a little longer and shorter than the budget, with a sink and two recent tokens."""
    heads, size, budget, lengths = 2, 30, 9, np.array([30, 11, 3])
    policy = parse(f"blockwise:base=keydiff,base.budget={budget},base.sinks=1,base.recent=2,block={block}")
    q, k, v = one_layer.random_streams(4, 3, heads, 2, size)
    _, entries = one_layer.read(policy, lengths, size, q, k, v)
    for row, length in enumerate(lengths):
        for head, held in enumerate(one_layer.held(entries, row)):
            keys = np.stack([rotated(k[row, head, size - length + p], p, 1e4) for p in range(length)])
            kept = list(range(min(budget, length)))
            for start in range(budget, length, block):
                among = np.array([*kept, *range(start, min(start + block, length))])
                scores = difference(keys[among])
                scores[(among == 0) | (among >= length - 2)] = np.inf
                kept = among[np.argsort(-scores, kind="stable")[:budget]].tolist()
            assert held == sorted(kept)


@pytest.mark.slow
def test_of_scores_that_compare_nothing_the_best_stay():
    """The norm of a key is the same among any entries, so blocks change nothing, also while decoding."""
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11)]
    caches = []
    for spec in ("knorm:budget=9,every=1", "blockwise:base=knorm,base.budget=9,base.every=1,block=4"):
        _, cache = tiny.prefill(params, spec, rows, 32)
        for token in range(5):
            _, cache = tiny.step(params, cache, np.full(2, token), np.ones(2, bool))
        caches.append([tiny.held(cache, row) for row in range(2)])
    assert caches[0] == caches[1]


@pytest.mark.parametrize("leaving", [0, 8])
def test_decoding_has_no_blocks(monkeypatch, leaving):
    """A head that evicts asks the base once, about all of its entries, and evicts by that score alone."""
    policy, (_, k, v) = parse("blockwise:base=keydiff,block=2"), one_layer.random_streams(7, 1, 2, 1, 12)
    entries = one_layer.entries_at(np.broadcast_to(np.arange(12), (2, 12)), k[0], v[0])
    moment = one_layer.moment(12, heads=2, counts=np.full(2, 12))
    own, shown = KeyDifference()(entries, moment), []
    monkeypatch.setattr(KeyDifference, "__call__", lambda self, among, moment: (shown.append(among), own)[1])
    scores = policy.score(entries, moment._replace(leaving=leaving))
    assert len(shown) == (1 if leaving else 2)
    np.testing.assert_array_equal(scores, own)


def test_refusals():
    with pytest.raises(ValueError, match=r"^blockwise: it .* the selection Chunks compares means of scores"):
        parse("blockwise:base=chunkkv")
