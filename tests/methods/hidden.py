"""What attention reads of a text in each layer, and the scores that a cache keeps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.attend.causal import causal


def hidden_states(params, row):
    """What attention reads of a text in each layer, [N, E], in float64, by causal attention over the whole text."""
    seen = []
    attend = causal(np.arange(len(row))[None])

    def look(layer, *args):
        seen.append(np.asarray(layer.hidden[0].astype(jnp.float32), np.float64))
        return attend(layer, *args)

    params(np.asarray(row)[None], look)
    return seen


def scored(cache, b):
    """{position: score} of each head of a row, by layer."""
    layers = []
    for layer in cache.entries:
        heads = zip(np.asarray(layer.positions[b]), np.asarray(layer.per_slot[b]), strict=True)
        layers.append([{int(p): s for p, s in zip(*pair, strict=True) if p >= 0} for pair in heads])
    return layers
