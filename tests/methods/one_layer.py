"""One attention layer with given queries, keys and values, under a policy: what tests of a method's selection need."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attend import reading, stepping
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, DecoderConfig, Rope
from kvjax.room import plan_read

ROPE = Rope(1e4)


@partial(jax.jit, static_argnames=("policy", "prompt"))
def read(policy, lengths, prompt, q, k, v):
    """The context of a prompt padded on the left to `prompt` tokens, and the entries after it."""
    config, layer = describe(q, k)
    cache = KVCache.empty(config, policy, lengths, prompt, jnp.float32)
    plan = plan_read(cache, [0], new=prompt, room=0, compress=True, final=True)
    behind = np.arange(prompt)[::-1]
    positions = jnp.where(behind < lengths[:, None], lengths[:, None] - 1 - behind, -1)
    attend = reading(policy, positions, lengths, lengths, plan=plan)
    return attend(layer, *(x[:, :, :prompt] for x in (q, k, v)), cache.entries)


@partial(jax.jit, static_argnames="policy")
def step(policy, positions, entries, q, k, v):
    """The context [B, Hq, 1, D] of one more token per row, at these positions, and the entries after it."""
    attend = stepping(policy, positions, jnp.ones(len(positions), bool))
    return attend(describe(q, k)[1], q, k, v, entries)


def describe(q, k):
    """A decoder's configuration and the record of its only layer."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], k.shape[3]
    config = DecoderConfig("llama", 2, 2, 2, heads, kv_heads, dim, (None,), ROPE, 10_000)
    return config, AttentionLayer(0, ROPE, None, config.scale, output=jnp.zeros((heads, dim, 2)))


def held(entries, row) -> list[list[int]]:
    """The positions that each head of a row holds, ascending."""
    return [sorted(head[head >= 0].tolist()) for head in np.asarray(entries[0].positions[row])]


def random_streams(seed, rows, kv_heads, group, tokens, dim=8):
    """q [B, Hq, T, D], k and v [B, H, T, D] from a normal distribution."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, group * kv_heads, tokens, dim)).astype(np.float32)
    k, v = rng.normal(size=(2, rows, kv_heads, tokens, dim)).astype(np.float32)
    return q, k, v
