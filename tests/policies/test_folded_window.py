"""What blocks of queries fold to: the same choices whatever the block, and the bytes that the docstring states."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import policies
from kvjax.pallas_kernels import Reduction
from kvjax.parts import FoldedWindow
from tests import tiny


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_every_block_keeps_the_same_tokens(fusion, chunk):
    """Of prompts shorter and longer than the window, read in one piece or in chunks that cut blocks."""
    params = tiny.decoder(heads=4, kv_heads=2)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (31, 18, 3)]
    held = []
    for block in (1, 3, 6):
        policy = policies.morphkv(budget=16, window=6, fusion=fusion, block=block)
        _, cache = tiny.prefill(params, policy, rows, 32, chunk=chunk)
        history = [[tiny.held(cache, b) for b in range(3)]]
        for i in range(20):
            _, cache = tiny.step(params, cache, np.array([i, 2 * i, 3 * i]), np.array([True, True, i % 2 == 0]))
            history.append([tiny.held(cache, b) for b in range(3)])
        held.append(history)
    assert held[0] == held[1] == held[2]
    assert len(held[0][-1][0][0][0]) == 16


def test_bytes_of_the_state():
    """R / block floats a slot, and R queries with a log-sum-exp each, their positions for each kv head."""
    params = tiny.decoder(heads=4, kv_heads=2)
    _, cache = tiny.prefill(params, "morphkv:budget=16,window=6,block=2", [np.arange(20)], 24)
    layer = cache.layers[0]
    assert layer.per_slot.shape == (1, 2, 3, 16)
    entries = 2 * 16 * (2 * 8 + 1) * 4 + 2 * 4
    assert cache.nbytes == entries + 2 * 3 * 16 * 4 + 4 * 6 * (8 + 1) * 4 + 2 * 6 * 4


def test_default_blocks_take_at_most_eight_numbers_a_slot():
    for window, block in ((32, 4), (200, 25), (30, 5), (31, 31), (4, 1)):
        score = policies.morphkv(budget=2048, window=window).score
        assert (score.window, score.block) == (window, block)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.morphkv(budget=64, window=32, block=5), "divisor of the window, 32"),
        (lambda: policies.morphkv(budget=64, window=32, block=0), "integer >= 1"),
        (lambda: policies.morphkv(budget=64, normalise="distant", block=4), "block=4 with normalise='distant'"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="mean")), "accepted are rows 'sum' and 'max'"),
        (lambda: FoldedWindow(8, 4, Reduction(rows="sum", group="max")), "of a group reduced first"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
