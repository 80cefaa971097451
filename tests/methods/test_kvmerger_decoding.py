"""KVMerger while decoding: a full head merges its entries, against the same algorithms in NumPy, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.parts import GaussianMerge
from kvjax.policies import adakv, kvmerger
from tests import tiny
from tests.methods.literal_merging import merge_down
from tests.methods.reference import _unrotated, attended, rotated, softmax
from tests.methods.test_kvmerger import check


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 2, {"theta": 0.5, "every": 1}),
        (7, 1, {"theta": None, "every": 3, "count_bias": True}),
        (4, 4, {"theta": 0.2, "every": 2, "straddle": True, "rule": "chain", "sigma": "rms"}),
    ],
)
def test_full_heads_merge_while_decoding(heads, kv_heads, options):
    """Three prompts, the second within the budget, and 16 steps: every key, value and score, in a constant cache.

    While others merge, a row with room keeps its entries bit by bit.
    """
    rng, budget, recent, heavy = np.random.default_rng(3), 14, 4, 3
    every, bias = options["every"], options.get("count_bias", False)
    rules = {k: v for k, v in options.items() if k not in ("every", "count_bias")} | {"recent": recent, "heavy": heavy}
    params = tiny.decoder(heads, kv_heads)
    rows = [np.repeat(rng.integers(0, tiny.VOCAB, n), 2)[:n] for n in (40, 9, 23)]
    more = np.repeat(rng.integers(0, tiny.VOCAB, (8, 3)), 2, axis=0)
    merge = GaussianMerge(heavy, **{k: v for k, v in options.items() if k != "every"})
    _, cache = tiny.prefill(params, kvmerger(budget, recent, every=every, merge=merge), rows, 48)
    texts = [np.append(row, tokens) for row, tokens in zip(rows, more.T, strict=True)]
    projected = []
    for text in texts:
        qkv = _unrotated(params, np.pad(text, (0, 64 - len(text)))[None])
        q, k, v = (np.asarray(x[0, :, : len(text)], np.float64) for x in qkv)
        projected.append((q.reshape(kv_heads, -1, *q.shape[1:]), k, v))
    held = [
        [
            merge_down({p: (*entry, 1) for p, entry in enumerate(zip(*head, strict=True))}, len(row), budget, **rules)
            for head in zip(*attended(params, row), strict=True)
        ]
        for row in rows
    ]
    merges = 0
    for step in range(len(more) + 1):
        for b, h in np.ndindex(3, kv_heads):
            slot = check(cache.entries[0], b, h, held[b][h])
            scores = np.asarray(cache.entries[0].per_slot[b, h])
            for position, entry in held[b][h].items():
                np.testing.assert_allclose(scores[slot[position]], entry[2], atol=1e-4)
        assert cache.entries[0].slots == budget
        if step == len(more):
            break
        before = cache.entries[0]
        _, cache = tiny.step(params, cache, more[step], np.ones(3, bool))
        for b in range(3):
            if max(map(len, held[b])) < budget:
                unchanged(before, cache.entries[0], b)
        for b, h in np.ndindex(3, kv_heads):
            t, (q, k, v) = len(rows[b]) + step, projected[b]
            own = held[b][h]
            if len(own) >= budget:
                own = merge_down(own, t, budget - every, **rules)
                merges += len(own) < budget - every or any(entry[3] > 1 for entry in own.values())
            own[t] = (rotated(k[h, t], t, 1e4), v[h, t], 0.0, 1)
            tokens = np.array([own[p][3] for p in own])
            logits = rotated(q[h, :, t], t, 1e4) @ np.stack([own[p][0] for p in own]).T / np.sqrt(k.shape[-1])
            weights = softmax(logits + (np.log(tokens) if bias else 0)).mean(axis=0)
            held[b][h] = {
                p: (key, value, score + weight, n)
                for (p, (key, value, score, n)), weight in zip(own.items(), weights, strict=True)
            }
    assert merges > 10


def unchanged(before, after, row):
    """All slots of a row are as they were but the one of the token that came in."""
    same = np.asarray(before.positions[row] == after.positions[row])
    assert (same.sum(axis=-1) == before.slots - 1).all()
    for name in ("keys", "values") if before.bias is None else ("keys", "values", "bias"):
        x, y = (np.asarray(getattr(entries, name)[row])[same] for entries in (before, after))
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_pool_of_segments_merges_as_layers_do():
    """Under AdaKV with alpha = 1 all heads have the same budget. A merge frees other slots than the lowest scores'."""
    rng = np.random.default_rng(2)
    rows = [np.repeat(rng.integers(0, tiny.VOCAB, n), 2)[:n] for n in (40, 9, 23)]
    more = np.repeat(rng.integers(0, tiny.VOCAB, (5, 3)), 2, axis=0)
    policy = kvmerger(14, recent=4, every=1, merge=GaussianMerge(heavy=3, theta=0.5))
    params, logits = tiny.decoder(), []
    for own in (policy, adakv(policy, alpha=1.0)):
        _, cache = tiny.prefill(params, own, rows, 48)
        for token in more:
            out, cache = tiny.step(params, cache, token, np.ones(3, bool))
        logits.append((out, [tiny.held(cache, b) for b in range(3)]))
    assert logits[0][1] == logits[1][1]
    np.testing.assert_allclose(logits[0][0], logits[1][0], atol=1e-5)
