"""CUR's norms against plain Python, in any order of slots; tests/methods/test_kvpress.py has kvpress's selections."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.policies import parse
from tests.methods import one_layer

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,window=5,sinks=2,every=2",)


@pytest.mark.parametrize(("kind", "window"), [("product", 3), ("mean", 4), ("key", 16), ("value", None)])
def test_shares_of_windows(kind, window):
    """17 entries with gaps between them, among empty slots, in two heads."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 2, 20, 4))
    positions = np.full((2, 20), -1)
    for head in range(2):
        positions[head, rng.permutation(20)[:17]] = rng.permutation(40)[:17]
    score = parse(f"cur:kind={kind},window={window}").score
    ours = np.asarray(score(one_layer.entries_at(positions, keys, values), one_layer.moment(40, heads=2)))[0]
    for head in range(2):
        order = [slot for slot in np.argsort(positions[head]) if positions[head, slot] >= 0]
        expected = {}
        for start in range(0, 17, window or 17):
            run = order[start : start + (window or 17)]
            k, v = ((x[head, run] ** 2).sum(-1) for x in (keys, values))
            k, v = (x / x.sum() if window else x for x in (k, v))
            joint = {"product": k * v, "mean": (k + v) / 2, "key": k, "value": v}[kind]
            expected |= dict(zip(run, joint, strict=True))
        total = sum(expected.values())
        np.testing.assert_allclose(ours[head, order], [expected[slot] / total for slot in order], rtol=1e-5)
