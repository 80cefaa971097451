"""What attention reads of a text in each layer, and the scores that a cache keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attend.causal import causal


def hidden_states(params, row):
    """What attention reads of a text in each layer, [N, E], in float64, by causal attention over the whole text."""
    padded = np.pad(row, (0, -len(row) % 32))  # behind the text, so that texts of several lengths share a program
    return [np.asarray(states, np.float64)[: len(row)] for states in _hidden_states(params, padded)]


@jax.jit
def _hidden_states(params, text):
    seen, attend = [], causal(jnp.arange(len(text))[None])

    def look(layer, *args):
        seen.append(layer.hidden[0].astype(jnp.float32))
        return attend(layer, *args)

    params(text[None], look)
    return seen


def scored(cache, b):
    """{position: score} of each head of a row, by layer."""
    layers = []
    for layer in cache.entries:
        heads = zip(np.asarray(layer.positions[b]), np.asarray(layer.per_slot[b]), strict=True)
        layers.append([{int(p): s for p, s in zip(*pair, strict=True) if p >= 0} for pair in heads])
    return layers
