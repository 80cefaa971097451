"""Codes as their definition has them, one range at a time, in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def literal_codes(x: np.ndarray, bits: int, axis: int, real: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of x [B, H, T, D], and the low and step of each range, over the tokens that are real [B, H, T, 1].

    A range is all numbers along `axis`. What is computed is float32, as in the cache.
    """
    codes = np.zeros(x.shape, int)
    ranges = [1 if i == axis else n for i, n in enumerate(x.shape)]
    low, step = np.zeros(ranges, np.float32), np.zeros(ranges, np.float32)
    real = np.broadcast_to(real, x.shape)
    for index in np.ndindex(*ranges):
        line = tuple(slice(None) if i == axis else n for i, n in enumerate(index))
        own = x[line][real[line]].astype(np.float32)
        if len(own):
            low[index] = own.min()
            step[index] = (own.max() - own.min()) * np.float32(1 / (2**bits - 1))
            exact = (x[line] - low[index]) / (step[index] or np.float32(1))
            codes[line] = np.where(real[line], np.clip(np.round(exact), 0, 2**bits - 1), 0)
    return codes, low, step


def literal_entries(
    keys: np.ndarray, values: np.ndarray, bits: int, divisors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the codes of one head's keys and values [n, D] stand for: keys by channel, values by token."""
    real = np.ones((1, 1, len(keys), 1), bool)
    found = []
    for x, axis in ((keys, 2), (values / divisors, 3)):
        codes, low, step = literal_codes(x[None, None], bits, axis, real)
        found.append((low + step * codes)[0, 0])
    return found[0], found[1] * divisors


def rounded(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """The numbers [..., D] that codes and bfloat16 scales hold, in NumPy."""
    largest = 2 ** (bits - 1) - 1
    grouped = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    scales = np.abs(grouped).max(axis=-1, keepdims=True) * np.float32(1 / largest)
    scales = scales.astype(jnp.bfloat16).astype(np.float32)
    return (np.clip(np.round(grouped / scales), -largest, largest) * scales).reshape(x.shape)
