"""Attention as the textbook has it, in float64 NumPy with every weight in memory, to measure kernels by."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np


def assert_close(actual, expected, typical: float = 1e-5, worst: float = 1e-4) -> None:
    """99 % of the entries within `typical` of what is expected and all of them within `worst`, infinities equal."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    actual, expected = actual[finite], expected[finite]
    error = np.abs(actual - expected) / np.maximum(1, np.abs(expected))
    assert error.size == 0 or (np.quantile(error, 0.99) <= typical and error.max() <= worst), (
        f"off by {np.quantile(error, 0.99):.2e} at the 99th percentile and {error.max():.2e} at most"
    )


def attention(q, k, q_positions, k_positions, scale, window=None, lse=None, bias=None, softcap=None, sinks=None):
    """(weights [B, Hq, W, M], lse [B, Hq, W], visible [B, H, W, M]); rows that see nothing have weights 0, lse -inf.

    Sinks [Hq] are one more logit of each row that sees something, whose weight is left out.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    groups = q.shape[1] // k.shape[1]
    t, p = np.asarray(q_positions)[:, None, :, None], np.asarray(k_positions)[:, :, None, :]
    visible = (p >= 0) & (p <= t) & (True if window is None else t - p < window)
    logits = scale * np.einsum("bhwd,bhmd->bhwm", q, np.repeat(k, groups, axis=1))
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits += np.repeat(np.asarray(bias, np.float64), groups, axis=1)[:, :, None]
    logits = np.where(np.repeat(visible, groups, axis=1), logits, -np.inf)
    if lse is None and sinks is not None:
        seen = np.isfinite(logits).any(axis=-1, keepdims=True)
        column = np.where(seen, np.asarray(sinks, np.float64)[:, None, None], -np.inf)
        logits = np.concatenate([logits, column], axis=-1)
    if lse is None:
        peak = logits.max(axis=-1, keepdims=True)
        peak = np.where(np.isneginf(peak), 0, peak)
        with np.errstate(divide="ignore"):
            lse = (peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)))[..., 0]
    lse = np.asarray(lse, np.float64)
    weights = np.exp(logits - np.where(np.isneginf(lse), 0, lse)[..., None])
    return weights[..., : k.shape[2]], lse, visible


def context(weights, v):
    return np.einsum(
        "bhwm,bhmd->bhwd", weights, np.repeat(np.asarray(v, np.float64), weights.shape[1] // v.shape[1], 1)
    )


def entries(rng, rows, heads, slots, past, dtype=np.float32, head_dim=8):
    """Keys, values and positions of cached slots in any order: positions below each row's `past`, some slots empty."""
    k, v = rng.normal(size=(2, rows, heads, slots, head_dim)).astype(dtype)
    positions = np.full((rows, heads, slots), -1)
    for b in range(rows):
        for h in range(heads):
            held = rng.permutation(past[b])[: rng.integers(0, min(slots, past[b]) + 1)]
            positions[b, h, rng.permutation(slots)[: held.size]] = held
    return k, v, positions


def left_padded(lengths, size, start):
    """Positions [B, size] of each row's last `lengths` tokens, counted from `start`, with -1 before them."""
    behind = np.arange(size)[::-1]
    lengths, start = np.asarray(lengths)[:, None], np.asarray(start)[:, None]
    return np.where(behind < lengths, start + lengths - 1 - behind, -1)


def compiled(kernel, *arrays, **options):
    """The kernel's answer under a jit of its own, so that tile sizes patched by a test are not taken from a cache."""
    return jax.jit(partial(kernel, **options))(*arrays)
