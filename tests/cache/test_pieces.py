"""Walks over segments: the length of their pieces changes nothing."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.cache import pieces
from kvjax.pallas_kernels import PAGE
from kvjax.reading import layers
from kvjax.reading.layers import step
from tests import tiny
from tests.dense import assert_close


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("policy", ["adakv:base=h2o,base.budget=56", "adakv:base=morphkv,base.budget=56,base.window=8"])
def test_pieces_of_a_page_are_as_one_piece(monkeypatch, policy):
    """Which entries leave, the state of those that stay, and the logits, in segments of several pages."""
    rng = np.random.default_rng(3)
    rows, tokens = [rng.integers(0, tiny.VOCAB, n) for n in (72, 60)], rng.integers(0, tiny.VOCAB, (4, 2))
    params = tiny.decoder()
    _, cache = tiny.prefill(params, policy, rows, 72)
    assert PAGE < np.max(cache.entries.used) <= pieces.PIECE

    def decode(piece):
        monkeypatch.setattr(pieces, "PIECE", piece)
        layers._traced.clear_cache()  # which has the program of a layer with pieces of another length
        one_step = jax.jit(lambda *arguments: step(*arguments))
        logits, after = [], cache
        for token in tokens:
            out, after = one_step(params, after, token, np.ones(2, bool))
            logits.append(np.asarray(out))
        return logits, after

    (logits, whole), (others, parted) = decode(pieces.PIECE), decode(PAGE)
    assert_close(np.stack(others), np.stack(logits), 1e-5, 1e-5)
    np.testing.assert_array_equal(parted.entries.positions, whole.entries.positions)
    for ours, expected in zip(*(jax.tree.leaves(x.entries.per_slot) for x in (parted, whole)), strict=True):
        assert_close(ours, expected, 1e-5, 1e-5)
