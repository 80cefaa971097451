"""Merging against its equations in NumPy, entry by entry; tests/methods/test_kvpress.py compares it with kvpress."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from kvjax.policies import h2o, knorm, merging, parse, snapkv
from kvjax.policy import Policy
from tests import tiny
from tests.products import each_once

OPTIONS = ("base=snapkv,base.budget=12,base.window=4,base.kernel=3", "base=knorm,base.budget=0.5,fraction=0.5")
ROWS = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (29, 9, 20)]


def expected(keys: np.ndarray, values: np.ndarray, kept: list[int], threshold: float, fraction: float) -> np.ndarray:
    """The values [n, D] of the retained positions of one head, of which all keys and values [N, D] are given."""
    lost = [i for i in range(len(keys)) if i not in kept]
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    cosines = unit[lost] @ unit[kept].T
    u, nearest = cosines.max(axis=1, initial=-np.inf), [kept[j] for j in cosines.argmax(axis=1)] if lost else []
    most = len(lost) - math.ceil((1 - fraction) * (len(lost) - 1) - 1e-6) if lost else 0
    merged = [j for j in np.argsort(-u, kind="stable")[:most] if u[j] >= threshold]
    result, total = values.copy(), np.ones(len(values))
    norms = np.linalg.norm(values, axis=-1)
    for j in merged:
        i, c = lost[j], nearest[j]
        weight = max(u[j], 0) * norms[i] / (norms[i] + norms[c] + 1e-6)
        result[c] += weight * values[i]
        total[c] += weight
    return (result / total[:, None])[kept]


@pytest.mark.parametrize(
    ("base", "threshold", "fraction"),
    each_once([snapkv(12, 4, 3), knorm(0.5), h2o(8, recent=3)], [0.0, 0.6], [1.0, 0.7, 0.25]),
)
def test_values_of_a_prompt(base: Policy, threshold: float, fraction: float) -> None:
    """Rows of different lengths, one of them within some budgets, in groups of 4 query heads."""
    params = tiny.decoder(8)
    cache = {}
    for name, policy in (("full", parse("full")), ("merged", merging(base, threshold, fraction))):
        _, cache[name] = tiny.prefill(params, policy, ROWS, 32)
    changed = 0
    for full, merged in zip(cache["full"].entries, cache["merged"].entries, strict=True):
        full, merged = (jax.tree.map(np.asarray, x) for x in (full, merged))
        for b, h in np.ndindex(*merged.positions.shape[:2]):
            all_of, some = (np.argsort(x.positions[b, h])[-np.sum(x.positions[b, h] >= 0) :] for x in (full, merged))
            kept = merged.positions[b, h, some].tolist()
            keys, values = (x[b, h, all_of].astype(np.float64) for x in (full.keys, full.values))
            np.testing.assert_array_equal(merged.keys[b, h, some], keys[kept].astype(np.float32))
            now = merged.values[b, h, some]
            np.testing.assert_allclose(now, expected(keys, values, kept, threshold, fraction), atol=1e-5)
            changed += int(np.sum(np.any(np.abs(now - values[kept]) > 1e-3, axis=-1)))
    assert changed > 0


def test_it_retains_what_its_base_retains() -> None:
    params = tiny.decoder(8)
    (_, base), (_, merged) = (
        tiny.prefill(params, policy, ROWS, 32) for policy in (snapkv(12, 4, 3), merging(snapkv(12, 4, 3)))
    )
    assert all(tiny.held(base, row) == tiny.held(merged, row) for row in range(len(ROWS)))


def test_a_base_that_merges_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^merging: its base merges entries itself, by SimilarityMerge; choose"):
        parse("merging:base=d2o")
