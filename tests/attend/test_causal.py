"""Training's blocked causal attention against JAX's own, which masks all pairs, with a rotation for each row."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from kvjax.attend.causal import causal
from kvjax.models import AttentionLayer, Rope, rotate
from kvjax.models.rope import DynamicScaling


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("length", "window"), [(37, 5), (1, None), (1, 5), (37, None), (37, 40)])
def test_blocks_equal_the_whole_and_so_do_gradients(length, window):
    B, Hq, H, D = 2, 6, 2, 8
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(B, h, length, D)).astype(np.float32) for h in (Hq, H, H))
    positions = np.cumsum(rng.integers(1, 4, (B, length)), axis=1)
    rope = Rope(100.0, DynamicScaling(4.0, 20))  # of which most rows have more
    layer = AttentionLayer(0, rope, window, 0.3, output=np.zeros((Hq, D, 1), np.float32))

    def blocked(q, k, v):
        context, cache = causal(positions, block=16)(layer, q, k, v, "untouched")
        assert cache == "untouched"
        return context

    def whole(q, k, v):
        own = rope.row_frequencies(D, positions[:, -1] + 1)
        q, k = (rotate(x, positions[:, None], own) for x in (q, k))
        local = None if window is None else (window - 1, 0)
        wide = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(*wide, scale=0.3, is_causal=True, local_window_size=local).swapaxes(1, 2)

    @partial(jax.jit, static_argnums=0)
    def result_and_gradients(f, *x):
        def loss(*x):
            y = f(*x)
            return (y**2).sum(), y

        gradients, y = jax.grad(loss, (0, 1, 2), has_aux=True)(*x)
        return y, gradients

    (ours, our_gradients), (theirs, their_gradients) = (result_and_gradients(f, q, k, v) for f in (blocked, whole))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
