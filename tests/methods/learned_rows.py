"""A decoder in NumPy that reads each text and the learned tokens behind it as one sequence, and goes on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.cache import Layers, Slots
from kvjax.kv_cache import KVCache
from tests import tiny
from tests.methods.reference import rotated, softmax

MAPS = {
    **{"self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key"},
    **{"self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.output"},
    **{"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"},
}


class Rows(NamedTuple):
    """A layer: the weights [Hq, T, N + T] of the last T tokens on all, and the keys and values [N + T, H, D] of all."""

    weights: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def normed(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)


def through(layer: Any, config: Any, window: int | None, x: np.ndarray, at: np.ndarray, product: Any, seen: Any) -> Any:
    """The states behind a layer, and its rotated keys, values and weights.

    Args:
        at: the positions of x.
        product: applies the layer's map of a name.
        seen: the keys, values [M, H, D], positions [M] and visibility [H, M] of entries before x.
    """
    D, G = config.head_dim, config.num_heads // config.num_kv_heads
    h = normed(x, layer.attention_norm.scale[...], config.norm_epsilon)
    q, k, v = (product(h, f"self_attn.{name}_proj").reshape(len(x), -1, D) for name in "qkv")
    q, k = (np.stack([rotated(y[t], at[t], 1e4) for t in range(len(x))]) for y in (q, k))
    keys, values, of = (np.concatenate(pair) for pair in zip(seen[:3], (k, v, at), strict=True))
    held = np.concatenate([seen[3], np.ones((config.num_kv_heads, len(x)), bool)], axis=1)
    distance = at[:, None] - of
    visible = (distance >= 0) & (distance < (window or np.inf)) & np.repeat(held, G, axis=0)[:, None]
    logits = np.einsum("nhd,mhd->hnm", q, np.repeat(keys, G, axis=1)) / np.sqrt(D)
    weights = softmax(np.where(visible, logits, -np.inf))
    context = np.einsum("hnm,mhd->nhd", weights, np.repeat(values, G, axis=1))
    x = x + product(context.reshape(len(x), -1), "self_attn.o_proj")
    h = normed(x, layer.mlp_norm.scale[...], config.norm_epsilon)
    gate = product(h, "mlp.gate_proj")
    return x + product(gate / (1 + np.exp(-gate)) * product(h, "mlp.up_proj"), "mlp.down_proj"), keys, values, weights


def nothing(config: Any) -> Any:
    none = np.zeros((0, config.num_kv_heads, config.head_dim))
    return none, none, np.zeros(0, int), np.ones((config.num_kv_heads, 0), bool)


def matrix(layer: Any, name: str, size: int) -> np.ndarray:
    part, own = MAPS[name].split(".")
    return np.asarray(getattr(getattr(layer, part), own)[...], np.float64).reshape(size, -1)


def sequence(params: Any, gates: Any, row: np.ndarray, count: int) -> list[Rows]:
    """Each layer of one sequence, a prompt and `count` learned tokens.

    The prompt runs with the model's matrices and the learned tokens with those and the adapters' products, all at once.
    """
    config, N = params.config, len(row)
    x = np.concatenate([np.asarray(params.embed[...], np.float64)[row], gates.layers[0]["tokens"][:count]])
    found = []
    for i, layer in enumerate(params.layers):

        def product(x: np.ndarray, name: str, layer=layer, tensors=gates.layers[i]) -> np.ndarray:
            y = x @ matrix(layer, name, x.shape[1])
            y[N:] += x[N:] @ tensors[f"{name}.lora_A.weight"].T @ tensors[f"{name}.lora_B.weight"].T
            return y

        x, keys, values, weights = through(
            layer, config, config.windows[i], x, np.arange(len(x)), product, nothing(config)
        )
        found.append(Rows(weights[:, N:], keys, values))
    return found


def logits_behind(params: Any, rows: list[Rows], held: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits [T, V] after each of some tokens behind a sequence, of which `held` [L][H] has the positions."""
    config, before = params.config, len(rows[0].keys)
    x, at = np.asarray(params.embed[...], np.float64)[tokens], before + np.arange(len(tokens))
    for i, (layer, own) in enumerate(zip(params.layers, rows, strict=True)):
        visible = np.array([np.isin(np.arange(before), positions) for positions in held[i]])
        seen = own.keys, own.values, np.arange(before), visible

        def product(x: np.ndarray, name: str, layer=layer) -> np.ndarray:
            return x @ matrix(layer, name, x.shape[1])

        x = through(layer, config, config.windows[i], x, at, product, seen)[0]
    x = normed(x, params.head.norm.scale[...], config.norm_epsilon)
    return x @ np.asarray(params.head.matrix[...], np.float64)


def cache_of(params: Any, policy: Any, each: list[list[Rows]], lengths: list[int], size: int, state: Any) -> KVCache:
    """The cache of prompts that have been read and not compressed, from their sequences [B][L].

    Args:
        state: of every slot, or None.
    """
    empty, layers = tiny.empty(params, policy, np.array(lengths), size), []
    for i, layer in enumerate(empty.entries):
        B, H, _, D = layer.keys.shape
        keys, values = np.zeros((2, B, H, size, D), np.float32)
        positions = np.full((B, H, size), -1)
        for b, n in enumerate(lengths):
            keys[b, :, size - n :] = each[b][i].keys[:n].swapaxes(0, 1)
            values[b, :, size - n :] = each[b][i].values[:n].swapaxes(0, 1)
            positions[b, :, size - n :] = np.arange(n)
        held = Slots(*map(jnp.asarray, (keys, values, positions)), layer.capacity)
        layers.append(replace(held, per_slot=None if state is None else jnp.full((B, H, size), state, jnp.float32)))
    return replace(empty, entries=Layers(tuple(layers)), length=jnp.array(lengths, jnp.int32))
