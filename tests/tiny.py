"""A small decoder and the few moves that tests make with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import policies
from kvjax.attention import causal
from kvjax.cache import KVCache
from kvjax.extend import read_prompt
from kvjax.extend import step as one_step
from kvjax.models import Decoder, DecoderConfig, Rope
from kvjax.policy import Policy

VOCAB = 64


@cache
def decoder(
    heads: int = 4, kv_heads: int = 2, windows: tuple[int | None, ...] = (None,), vocab: int = VOCAB
) -> Decoder:
    """Random weights: a layer for each window, of width 32, with heads of 8. One layer compiles faster than two."""
    config = DecoderConfig("llama", vocab, 32, 48, heads, kv_heads, 8, windows, Rope(1e4), 4096)
    return Decoder(config, nnx.Rngs(0))


def left_pad(rows: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, size], each row's at the right, and lengths [B]."""
    tokens = np.zeros((len(rows), size), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[size - len(row) :] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def empty(params: Decoder, policy: Policy | str, lengths: np.ndarray, size: int) -> KVCache:
    policy = policies.parse(policy) if isinstance(policy, str) else policy
    return KVCache.empty(params.config, policy, jnp.asarray(lengths), size, jnp.float32)


def prefill(params, policy, rows, size, *, room=8, chunk=None, compress="auto"):
    """(logits, cache) after reading the rows, padded on the left to `size`."""
    tokens, lengths = left_pad(rows, size)
    return read_prompt(
        params, empty(params, policy, lengths, size), tokens, lengths, room=room, chunk=chunk, compress=compress
    )


step = jax.jit(one_step)
_causal_logits = jax.jit(lambda params, x: params.logits(params(x, causal(jnp.arange(x.shape[1])[None]))[0]))


def full_logits(params: Decoder, rows: list[np.ndarray], size: int) -> list[np.ndarray]:
    """Logits [n, V] at every position of each row under plain causal attention; padding is on the right, unseen."""
    padded = np.zeros((len(rows), size), np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    logits = np.asarray(_causal_logits(params, padded))
    return [line[: len(row)] for line, row in zip(logits, rows, strict=True)]


def held(cache: KVCache, row: int) -> list[list[list[int]]]:
    """The positions that a row holds, ascending, by layer and head."""
    layers: list[Any]
    if cache.pool is None:
        layers = [np.asarray(layer.positions[row]) for layer in cache.layers]
    else:
        pool, positions = cache.pool, np.asarray(cache.pool.positions[row])
        start, size = np.asarray(pool.start[row]), np.asarray(pool.size[row])
        lane = np.arange(len(start)) * pool.lanes // len(start)
        layers = [
            [positions[lane[h], start[h, i] : start[h, i] + size[h, i]] for h in range(len(start))]
            for i in range(pool.layers)
        ]
    return [[sorted(head[head >= 0].tolist()) for head in layer] for layer in layers]
