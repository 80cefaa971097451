"""The allocation of a budget that layers or heads share, once all layers have read a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attend import over_layers
from kvjax.cache import UNLIMITED, Entries, Layers, Segments, Slots, pack
from kvjax.kv_cache import KVCache
from kvjax.mesh.heads import Heads
from kvjax.models import AttentionLayer, Decoder
from kvjax.pallas_kernels import PAGE
from kvjax.policy import Moment, Policy
from kvjax.runtime.clock import Run, run_at_once

from .room import occupied_slots


def allocated(
    params: Decoder, cache: KVCache, room: int, begins: bool, *, longest: int | None = None, run: Run = run_at_once
) -> KVCache:
    """Returns the cache of a prompt that has been read and replayed, in a pool with each head's own number of entries.

    Args:
        room: the number of slots for tokens to come in each segment that grows.
        begins: whether the prompt was read in one call, so that it is as long as the cache was made for.
        longest: the static bound of segments, where the policy needs one; None for the longest segment there is, which
            the host reads outside of programs.
        run: how programs are run.
    """
    policy, kept = cache.policy, cache.kept
    if not begins:
        kept = tuple(max(most or 0, now) for most, now in zip(kept, cache.entries.bounds, strict=True))
    cache = run(allocate, params, cache, rows=pool_rows(policy, kept, cache.entries.kv_heads, room), room=room)
    if not shows_whole_segments(policy) or isinstance(cache.length, jax.core.Tracer):
        return cache
    if longest is None:
        pairs = zip(occupied_slots(cache), policy.limits(len(cache.kept)).evicts, strict=True)
        longest = max((held for held, evicts in pairs if evicts), default=0)
    return replace(cache, entries=cache.entries.within(longest))


def shows_whole_segments(policy: Policy) -> bool:
    """Returns whether decoding lays segments out as long as the longest one that it evicts from."""
    return policy.every is not None and not policy.piecewise


def pool_rows(policy: Policy, kept: Sequence[int | None], kv_heads: int, room: int) -> int:
    """Returns the rows of a lane of the pool: the budget, PAGE - 1 more per segment, and room where segments grow.

    Args:
        kept: of the cache: the size of the prompts, for each layer.
    """
    budget: Any = policy.budget
    layers, size = len(kept), max(most or 0 for most in kept)
    heads = kv_heads // budget.layout.lanes(kv_heads)
    means = [policy.slots(i, size, layers) for i in range(layers)]
    growing = growing_segments(policy, layers, heads)
    return budget.entries(means, size, heads) + layers * heads * (PAGE - 1) + room * growing


def growing_segments(policy: Policy, layers: int, heads: int) -> int:
    """Returns the number of segments of a lane with `heads` heads that grow while decoding."""
    layout = policy.budget.layout
    assert layout is not None
    return layers * heads if policy.every is None else layout.growing_segments(layers, heads)


@partial(jax.jit, static_argnames=("rows", "room"))
def allocate(params: Decoder, cache: KVCache, *, rows: int, room: int) -> KVCache:
    """Returns the cache of a prompt that has been read to its end, compressed to each head's number of entries.

    Args:
        rows: of each lane of the pool, from `pool_rows`.
        room: the number of slots for tokens to come in each segment that grows.
    """
    change = partial(_allocate, cache.policy, rows=rows, room=room)
    entries: Entries = over_layers(
        cache.mesh, change, params.attention_layers, cache.entries, next_position=cache.length, rope=cache.rope
    )
    # Later turns compress segments to their own capacities.
    return replace(cache, entries=entries, kept=(UNLIMITED,) * len(cache.kept), filled=True).in_place()


def _allocate(
    policy: Policy,
    records: Sequence[AttentionLayer],
    layers: Layers,
    next_position: Int[Array, "B"],
    rope: Float[Array, "B C/2"] | None,
    heads: Heads,
    *,
    rows: int,
    room: int,
) -> Segments:
    moments = [Moment(next_position, record, rope, heads) for record in records]
    pairs = list(zip(layers, moments, strict=True))
    scores = [ranked(policy, *pair) for pair in pairs]
    counts = counted(policy, scores, [layer.capacity for layer in layers], heads)
    retained = [retain(policy, *pair, ranks, count) for pair, ranks, count in zip(pairs, scores, counts, strict=True)]
    lanes, growing = laid_out(policy, len(layers), counts.shape[2], heads)
    return pack(retained, lanes=lanes, rows=rows, room=room, growing=growing)


def ranked(policy: Policy, layer: Slots, moment: Moment) -> Float[Array, "B H M"]:
    """Returns the scores of a layer's entries that the budget compares with those of other layers."""
    budget: Any = policy.budget
    return policy.rank(layer, moment, None, raised=not budget.layout.compares_protected)


def counted(
    policy: Policy, scores: Sequence[Float[Array, "B H M"]], capacities: Sequence[Int[Array, "B H"]], heads: Heads
) -> Int[Array, "L B H"]:
    """Returns the number of entries that each head of each layer retains."""
    budget: Any = policy.budget
    most = max(x.shape[-1] for x in scores)
    padded = [jnp.pad(x, [(0, 0), (0, 0), (0, most - x.shape[-1])], constant_values=-jnp.inf) for x in scores]
    means = jnp.stack([capacity[:, 0] for capacity in capacities])
    return budget.allocate(jnp.stack(padded), means, 0 if policy.every is None else policy.minimum, heads)


def retain(
    policy: Policy, layer: Slots, moment: Moment, scores: Float[Array, "B H M"], count: Int[Array, "B H"]
) -> Slots:
    """Returns the entries that each head of a layer retains, in its first slots. A head that grows has no capacity."""
    budget: Any = policy.budget
    mean, layer = layer.capacity[:, 0], replace(layer, capacity=count)
    # The scores that were compared also choose, unless they depend on what has been allocated by now.
    needs_counts = policy.score.needs.by_count or isinstance(policy.protect.recent, float)
    if needs_counts or budget.layout.compares_protected:
        scores = policy.rank(layer, moment, jnp.minimum(count, layer.slots))
    kept = policy.retain(layer, moment, scores, layer.slots)
    if policy.every is None:
        return replace(kept.without_state(), capacity=jnp.full_like(count, UNLIMITED))
    # A prompt within the budget leaves all heads alike, to be filled while decoding.
    within = (moment.next_position <= mean)[:, None] & (count < UNLIMITED)
    return replace(kept, capacity=jnp.where(within, mean[:, None], count))


def laid_out(policy: Policy, layers: int, kv_heads: int, heads: Heads) -> tuple[int, int]:
    """Returns the number of lanes that a device has for its kv heads, and of the segments of a lane that grow."""
    budget: Any = policy.budget
    lanes = budget.layout.lanes(kv_heads * heads.kv_devices()) // heads.kv_devices()
    return lanes, growing_segments(policy, layers, kv_heads // lanes)
