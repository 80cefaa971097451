"""Sharing a budget out among layers and heads, when a prompt has been read: from full layers to a pool of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache, LayerCache
from kvjax.heads import Heads
from kvjax.models import AttentionLayer, Decoder
from kvjax.pallas_kernels import PAGE
from kvjax.policy import Policy
from kvjax.protocols import UNLIMITED, Moment, SharedBudget
from kvjax.ragged import RaggedCache
from kvjax.spread import over_layers


def share_out(params: Decoder, cache: KVCache, *, rows: int, room: int) -> KVCache:
    """The cache of a prompt that has been read to its end, compressed to what the policy's budget gives each head.

    Args:
        rows: of each lane of the pool, see `pool_rows`.
        room: slots for tokens to come in each segment that grows.
    """
    change = partial(_share, cache.policy, rows=rows, room=room)
    pool = over_layers(
        cache.mesh, change, params.attention_layers, cache.layers, next_position=cache.length, rope=cache.rope
    )
    return replace(cache, layers=(), pool=pool, filled=True).in_place()


def pool_rows(policy: Policy, kept: Sequence[int | None], kv_heads: int, room: int) -> int:
    """Rows of a lane of the pool: what a prompt is allowed, PAGE - 1 more a segment, and room where they grow."""
    budget = policy.budget
    assert isinstance(budget, SharedBudget)
    heads = kv_heads // lanes(budget, kv_heads)
    slots = [count for count in kept if count is not None]
    return budget.entries(slots, heads) + len(kept) * heads * (PAGE - 1) + room * growing(policy, len(kept), heads)


def growing(policy: Policy, layers: int, heads: int) -> int:
    """How many segments of a lane of so many heads grow while decoding."""
    assert isinstance(policy.budget, SharedBudget)
    return layers * heads if policy.every is None else policy.budget.growing(layers, heads)


def lanes(budget: SharedBudget, kv_heads: int) -> int:
    """Heads that keep equally many lie side by side in lanes of their own; those that compete share one."""
    return kv_heads if budget.groups is None else budget.groups


def _share(
    policy: Policy,
    records: Sequence[AttentionLayer],
    layers: tuple[LayerCache, ...],
    next_position: Int[Array, "B"],
    rope: Float[Array, "B R/2"] | None,
    heads: Heads,
    *,
    rows: int,
    room: int,
) -> RaggedCache:
    budget = policy.budget
    assert isinstance(budget, SharedBudget)
    moments = [Moment(next_position, record, rope, heads) for record in records]
    scores = [policy.rank(entries, moment) for entries, moment in zip(layers, moments, strict=True)]
    size = max(layer.slots for layer in layers)
    shown = scores
    if budget.shows_protected:
        shown = [policy.rank(entries, moment, raised=False) for entries, moment in zip(layers, moments, strict=True)]
    padded = [jnp.pad(x, [(0, 0), (0, 0), (0, size - x.shape[-1])], constant_values=-jnp.inf) for x in shown]
    mean = layers[0].capacity[:, 0]
    least = 0 if policy.every is None else policy.minimum
    counts = budget.share(jnp.stack(padded), mean, least, heads)
    shared = []
    for entries, moment, ranked, count in zip(layers, moments, scores, counts, strict=True):
        entries = replace(entries, capacity=count)
        if isinstance(policy.protect.recent, float):  # a share of what the head keeps, which is known by now
            ranked = policy.rank(entries, moment)
        kept = policy.retain(entries, moment, ranked, entries.slots)
        if policy.every is None:
            kept = replace(kept, capacity=jnp.full_like(count, UNLIMITED), per_slot=None, per_row=None)
        else:  # a prompt within the budget leaves all heads alike, to be filled while decoding
            within = (next_position <= mean)[:, None] & (count < UNLIMITED)
            kept = replace(kept, capacity=jnp.where(within, mean[:, None], count))
        shared.append(kept)
    own = counts.shape[2]
    return RaggedCache.pack(shared, lanes(budget, own * heads.kv_devices()) // heads.kv_devices(), rows, room)
