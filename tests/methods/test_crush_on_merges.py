"""KVCrush on bases that merge: the literal algorithms of both, one after the other."""

from __future__ import annotations

import numpy as np

from kvjax.parts import GaussianMerge
from kvjax.policies import cam, kvcrush, kvmerger
from tests import tiny
from tests.methods.literal_crush import literal
from tests.methods.literal_merging import condense
from tests.methods.reference import attended


def test_merged_entries_that_do_not_fit_are_represented():
    """Of KVMerger's sets with a fixed theta, KVCrush retains the most attended to and representatives."""
    rng, budget = np.random.default_rng(5), 18
    rows = [np.repeat(rng.integers(0, tiny.VOCAB, n), 2)[:n] for n in (44, 31, 12)]
    params, options = tiny.decoder(8, 2), {"recent": 5, "heavy": 3, "theta": 0.5}
    base = kvmerger(budget, recent=5, merge=GaussianMerge(heavy=3, theta=0.5))
    _, cache = tiny.prefill(params, kvcrush(base, share=0.4), rows, 48)
    _, alone = tiny.prefill(params, base, rows, 48)
    entries, merged = cache.entries[0], 0
    for b, row in enumerate(rows):
        n, heads = len(row), list(zip(*attended(params, row), strict=True))
        sets = [condense(*head, budget=budget, fits=n, **options) for head in heads]
        texts = [{p: scores[p] for p in own} for own, (_, _, scores) in zip(sets, heads, strict=True)]
        ages = n - np.arange(n)
        expected = literal(texts, [budget] * 2, 0.4, protected=range(n - 5, n), ages=ages)
        assert tiny.held(cache, b)[0] == expected
        for h, own in enumerate(sets):
            for slot in np.flatnonzero(entries.positions[b, h] >= 0):
                key, value = own[int(entries.positions[b, h, slot])]
                np.testing.assert_allclose(entries.keys[b, h, slot], key, atol=1e-5)
                np.testing.assert_allclose(entries.values[b, h, slot], value, atol=1e-5)
                merged += not np.allclose(key, heads[h][0][int(entries.positions[b, h, slot])])
    assert merged > 3
    assert tiny.held(cache, 0) != tiny.held(alone, 0)


def test_a_representative_that_leaves_hands_its_value_on():
    """On CaM: the sinks and the newest are important, and bits follow from the attention by age.

    While decoding, the oldest entry after the sinks leaves, and its value goes to the next 4.
    """
    rng = np.random.default_rng(6)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (44, 31, 12)]
    params = tiny.decoder(8, 2)
    _, cache = tiny.prefill(params, kvcrush(cam(20, sinks=2, tokens=4, form="expected"), share=0.4), rows, 48)
    for b, row in enumerate(rows):
        ages = len(row) - np.arange(len(row))
        texts = [dict(enumerate(scores)) for scores in attended(params, row)[2]]
        assert tiny.held(cache, b)[0] == literal(texts, [20, 20], 0.4, protected={0, 1}, ages=ages, newest=True)
    before = cache.entries[0]
    _, cache = tiny.step(params, cache, rng.integers(0, tiny.VOCAB, 3), np.ones(3, bool))
    after = cache.entries[0]
    for b, h in np.ndindex(2, 2):
        positions, received = np.asarray(before.positions[b, h]), np.asarray(before.per_slot[b, h])
        order = np.argsort(positions)
        victim, following = order[2], order[3:7]
        assert positions[victim] < len(rows[b]) - 12, "a representative"
        expected = np.array(before.values[b, h])
        share = min(1.0, received[victim] / received[following].mean()) / 4
        expected[following] += share * expected[victim]
        expected[victim] = after.values[b, h, victim]  # overwritten
        np.testing.assert_allclose(after.values[b, h], expected, atol=1e-5)
        assert after.positions[b, h, victim] == len(rows[b])
