"""Training's blocked causal attention against JAX's own, which masks all pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attend.causal import causal
from kvjax.models import AttentionLayer, Rope, rotate


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("length", [1, 37])
def test_blocks_equal_the_whole_and_so_do_gradients(length, window):
    B, Hq, H, D = 2, 6, 2, 8
    keys = jax.random.split(jax.random.key(length), 4)
    q, k, v = (jax.random.normal(key, (B, h, length, D)) for key, h in zip(keys[:3], (Hq, H, H), strict=True))
    positions = jnp.cumsum(jax.random.randint(keys[3], (B, length), 1, 4), axis=1)
    layer = AttentionLayer(0, Rope(100.0), window, 0.3, output=jnp.zeros((Hq, D, 1)))

    def blocked(q, k, v):
        context, cache = causal(positions, block=16)(layer, q, k, v, "untouched")
        assert cache == "untouched"
        return context

    def whole(q, k, v):
        q, k = (rotate(x, positions[:, None], layer.rope.frequencies(D)) for x in (q, k))
        local = None if window is None else (window - 1, 0)
        wide = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(*wide, scale=0.3, is_causal=True, local_window_size=local).swapaxes(1, 2)

    np.testing.assert_allclose(blocked(q, k, v), whole(q, k, v), atol=1e-5)
    ours, theirs = (jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v) for f in (blocked, whole))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
