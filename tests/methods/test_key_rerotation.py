"""Keys at consecutive positions: read at once or in pieces, refusals. tests/methods/test_kvpress.py has the answers."""

from __future__ import annotations

import numpy as np
import pytest

from tests import tiny

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("base=snapkv,base.budget=12,base.window=4,base.kernel=3",)

ROTATED = "key_rerotation:base=snapkv,base.budget=9,base.window=3"


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_same_entries_at_other_distances(chunk):
    """The prompt is read and scored at its own positions, also in pieces; the answer is another one."""
    params, rows = tiny.decoder(), [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (30, 11, 4)]
    plain = tiny.prefill(params, "snapkv:budget=9,window=3", rows, 32)
    moved = tiny.prefill(params, ROTATED, rows, 32, chunk=chunk)
    np.testing.assert_allclose(moved[0], plain[0], atol=1e-5)
    steps = [tiny.step(params, cache, np.arange(3), np.ones(3, bool)) for _, cache in (plain, moved)]
    for row in range(3):
        assert tiny.held(steps[0][1], row) == tiny.held(steps[1][1], row)
    apart = np.abs(steps[0][0] - steps[1][0]).max(axis=1)
    assert (apart[:2] > 1e-3).all()
    assert apart[2] < 1e-5  # nothing was dropped


def test_a_second_compression_is_refused():
    """The queries that the score kept met the keys at other places."""
    with pytest.raises(ValueError, match="compress='chunk' would score by queries that were kept before"):
        tiny.prefill(tiny.decoder(), ROTATED, [np.arange(20)], 24, chunk=8, compress="chunk")
