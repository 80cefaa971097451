"""Guides of rows against NumPy: masks, biases, and the most probable tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.decoding.row_guides import TOP, RowGuides, most_probable_tokens


@pytest.mark.parametrize("vocab", [7, 64, 101])
def test_masks_and_biases(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    guides = RowGuides.none(3, vocab, 5)
    np.testing.assert_array_equal(jax.jit(lambda guides, x: guides(x))(guides, logits), logits)
    kept = rng.random((2, vocab)) < 0.5
    for row, mask in enumerate(kept):
        bits = np.packbits(np.pad(mask, (0, -vocab % 32)), bitorder="little").view(np.uint32)
        guides.allowed[row] = bits
    guides.ids[0, :3] = [0, 5, vocab - 1]
    guides.biases[0, :3] = [1.5, -2, 4]
    expected = logits.copy()
    expected[0, [0, 5, vocab - 1]] += np.float32([1.5, -2, 4])
    expected[:2] = np.where(kept, expected[:2], -np.inf)
    np.testing.assert_array_equal(jax.jit(lambda guides, x: guides(x))(guides, logits), expected)


@pytest.mark.parametrize("vocab", [7, 101])
def test_the_most_probable_tokens(vocab: int) -> None:
    logits = np.random.default_rng(0).normal(size=(2, vocab)).astype(np.float32)
    ids, bits = np.asarray(jax.jit(most_probable_tokens)(logits))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(ids.T, order)
    log_probs = logits - np.log(np.exp(logits.astype(float)).sum(axis=1, keepdims=True))
    expected = np.take_along_axis(log_probs, order, axis=1)
    np.testing.assert_allclose(np.ascontiguousarray(bits.T).view(np.float32), expected, rtol=1e-5)
