"""One attention layer with given queries, keys and values, under a policy: what tests of a method's selection need."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attend import Reading, Stepping
from kvjax.cache import Slots
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, DecoderConfig, Rope
from kvjax.policy import Moment
from kvjax.reading.room import plan_read

ROPE = Rope(1e4)


@partial(jax.jit, static_argnames=("policy", "prompt"))
def read(policy, lengths, prompt, q, k, v):
    """The context of a prompt padded on the left to `prompt` tokens, and the entries after it."""
    config, layer = describe(q, k)
    cache = KVCache.empty(config, policy, lengths, prompt, jnp.float32)
    plan = plan_read(cache, [0], new=prompt, room=0, compress=True, final=True)
    behind = np.arange(prompt)[::-1]
    positions = jnp.where(behind < lengths[:, None], lengths[:, None] - 1 - behind, -1)
    attend = Reading(policy, policy.limits(1), plan)(positions, lengths, lengths)
    return attend(layer, *(x[:, :, :prompt] for x in (q, k, v)), cache.entries)


@partial(jax.jit, static_argnames="policy")
def step(policy, positions, entries, q, k, v):
    """The context [B, Hq, 1, D] of one more token per row, at these positions, and the entries after it."""
    attend = Stepping(policy, policy.limits(1))(positions, jnp.ones(len(positions), bool))
    return attend(describe(q, k)[1], q, k, v, entries)


def describe(q, k):
    """A decoder's configuration and the record of its only layer."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], k.shape[3]
    config = DecoderConfig("llama", 2, 2, 2, heads, kv_heads, dim, (None,), ROPE, 10_000)
    return config, AttentionLayer(0, ROPE, None, config.scale, output=jnp.zeros((heads, dim, 2)))


def held(entries, row) -> list[list[int]]:
    """The positions that each head of a row holds, ascending."""
    return [sorted(head[head >= 0].tolist()) for head in np.asarray(entries[0].positions[row])]


def assert_follows(policy, literal, lengths, prompt, q, k, v):
    """Reads prompts and steps through the other tokens, and asserts that heads hold what literal heads hold.

    Args:
        policy: with a budget of a fixed number of entries, which evicts while decoding.
        literal: [B][H] heads of one text. Each has `keys` by position, `see(position, q, k)` for the next token with
            the queries of the group, and `evict(now, count)`, which drops nothing if count is not positive.
        lengths: of the prompts, which are padded on the left to `prompt` tokens.
        q, k, v: of prompts and steps.
    """
    budget, group = policy.budget.entries, q.shape[1] // k.shape[1]
    heads = list(np.ndindex(len(lengths), k.shape[1]))
    _, entries = read(policy, lengths, prompt, q, k, v)

    def see(row, h, position, at):
        literal[row][h].see(position, q[row, h * group : (h + 1) * group, at], k[row, h, at])

    def assert_same():
        for row, own in enumerate(literal):
            assert held(entries, row) == [sorted(head.keys) for head in own]

    for row, h in heads:
        for p in range(lengths[row]):
            see(row, h, p, prompt - lengths[row] + p)
        literal[row][h].evict(lengths[row], lengths[row] - budget)
    assert_same()
    for t in range(q.shape[2] - prompt):
        for row, h in heads:
            if len(literal[row][h].keys) >= budget:
                literal[row][h].evict(lengths[row] + t, policy.every)
            see(row, h, lengths[row] + t, prompt + t)
        at = slice(prompt + t, prompt + t + 1)
        _, entries = step(policy, lengths + t, entries, q[:, :, at], k[:, :, at], v[:, :, at])
        assert_same()


def random_streams(seed, rows, kv_heads, group, tokens, dim=8):
    """q [B, Hq, T, D], k and v [B, H, T, D] from a normal distribution."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, group * kv_heads, tokens, dim)).astype(np.float32)
    k, v = rng.normal(size=(2, rows, kv_heads, tokens, dim)).astype(np.float32)
    return q, k, v


def entries_at(positions, keys=None, values=None, per_slot=None) -> Slots:
    """Entries of one row at positions [H][M], -1 for empty slots, with arrays [H, M, ...] of what is given."""
    positions = jnp.asarray(positions, jnp.int32)[None]
    zeros = np.zeros((*positions.shape[1:], 4), np.float32)
    keys, values = (jnp.asarray(zeros if x is None else x, jnp.float32)[None] for x in (keys, values))
    state = None if per_slot is None else jnp.asarray(per_slot)[None]
    return Slots(keys, values, positions, jnp.full(positions.shape[:2], positions.shape[2]), state)


def moment(next_position, heads=1, window=None, index=0, counts=None) -> Moment:
    """When and where the entries of one row are scored."""
    layer = AttentionLayer(index, ROPE, window, 0.5, jnp.zeros((heads, 4, 1)))
    counts = None if counts is None else jnp.asarray(counts)[None]
    return Moment(jnp.array([next_position]), layer, counts=counts)


def compress(policy, entries, moment, slots) -> Slots:
    """What `Policy.compress` leaves, as one program."""
    return jax.jit(lambda entries: policy.compress(entries, moment, slots))(entries)


@partial(jax.jit, static_argnames=("policy", "prompt"))
def scores(policy, lengths, prompt, q, k, v):
    """The scores [B, H, prompt] of a prompt's entries before anything is dropped, -inf for empty slots."""
    config, layer = describe(q, k)
    cache = KVCache.empty(config, policy, lengths, prompt, jnp.float32)
    plan = plan_read(cache, [0], new=prompt, room=0, compress=False, final=False)
    behind = np.arange(prompt)[::-1]
    positions = jnp.where(behind < lengths[:, None], lengths[:, None] - 1 - behind, -1)
    attend = Reading(policy, policy.limits(1), plan)(positions, lengths, lengths)
    _, entries = attend(layer, q, k, v, cache.entries)
    return policy.rank(entries.layer(0, prompt), Moment(lengths, layer), None, raised=False)
