"""The allocation of a budget that layers or heads share, once all layers have read a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.attend import over_layers
from kvjax.cache import UNLIMITED, Segments, Slots, empty_pool, rows_to_grow
from kvjax.kv_cache import KVCache
from kvjax.mesh.heads import Heads
from kvjax.models import AttentionLayer, Decoder
from kvjax.pallas_kernels import PAGE, compact
from kvjax.policy import Moment, Policy
from kvjax.runtime.clock import Run, run_at_once
from kvjax.runtime.memory import check_bytes, device_memory, tree_bytes

from .beside import Beside, with_learned
from .layers import facts_of
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
    rows = pool_rows(replace(cache, kept=kept), room)
    _check_fits(cache, rows)
    cache, beside = with_learned(params, cache, run=run)
    cache = allocate(params, cache, beside, rows=rows, room=room, run=run)
    if not shows_whole_segments(policy) or isinstance(cache.length, jax.core.Tracer):
        return cache
    if longest is None:
        pairs = zip(occupied_slots(cache), policy.limits(len(cache.kept)).evicts, strict=True)
        longest = max((held for held, evicts in pairs if evicts), default=0)
    pool = cache.entries
    assert isinstance(pool, Segments)
    return replace(cache, entries=pool.within(longest))


def _check_fits(cache: KVCache, rows: int) -> None:
    """Raises MemoryError if a pool with so many rows per lane exceeds the devices that hold the cache."""
    if not isinstance(cache.length, jax.Array) or isinstance(cache.length, jax.core.Tracer):
        return
    layer, devices = cache.entries[0], cache.length.sharding.addressable_devices
    budget: Any = cache.policy.budget
    lanes = budget.layout.lanes(cache.entries.heads[0].number)
    row = tree_bytes((layer.keys, layer.values, layer.positions)) // layer.positions.size
    needed = row * cache.batch_size * lanes * rows // (1 if cache.mesh is None else cache.mesh.size)
    check_bytes("the cache", needed, device_memory(devices))


def shows_whole_segments(policy: Policy) -> bool:
    """Returns whether decoding lays segments out as long as the longest one that it evicts from."""
    return policy.every is not None and not policy.piecewise


def pool_rows(cache: KVCache, room: int) -> int:
    """Returns the rows of a lane of the pool: the budget, PAGE - 1 more per segment, and room where segments grow.

    Args:
        cache: before the pool is made. `kept` is the size of the prompts, for each layer.
        room: the number of tokens to come.
    """
    budget: Any = cache.policy.budget
    layers, size, kv_heads = len(cache.kept), max(most or 0 for most in cache.kept), cache.entries.heads[0].number
    heads = kv_heads // budget.layout.lanes(kv_heads)
    # Learned tokens are cached beside what the budget retains, also in a layer with a sliding window.
    windows = [UNLIMITED if window is None else window + cache.policy.learned_count for window in cache.windows]
    means = [min(cache.policy.slots(i, size, layers) or 0, window) for i, window in enumerate(windows)]
    sizes = [min(size, window) for window in windows]
    growing = growing_segments(cache.policy, layers, heads)
    more = rows_to_grow(room, cache.windows, heads, growing)
    return budget.entries(means, sizes, heads) + layers * heads * (PAGE - 1) + more


def growing_segments(policy: Policy, layers: int, heads: int) -> int:
    """Returns the number of segments of a lane with `heads` heads that grow while decoding."""
    layout = policy.budget.layout
    assert layout is not None
    return layers * heads if policy.every is None else layout.growing_segments(layers, heads)


def laid_out(policy: Policy, layers: int, kv_heads: int, heads: Heads) -> tuple[int, int]:
    """Returns the number of lanes that a device has for its kv heads, and of the segments of a lane that grow."""
    budget: Any = policy.budget
    lanes = budget.layout.lanes(kv_heads * heads.kv_devices()) // heads.kv_devices()
    return lanes, growing_segments(policy, layers, kv_heads // lanes)


def allocate(
    params: Decoder, cache: KVCache, beside: Beside, *, rows: int, room: int, run: Run = run_at_once
) -> KVCache:
    """Returns the cache of a prompt that has been read to its end, compressed to each head's number of entries.

    A program scores a layer, one divides the budget, and one puts a layer into the pool. Layers of a kind share theirs.

    Args:
        beside: what is cached in any case, and is not scored.
        rows: of each lane of the pool, from `pool_rows`.
        room: the number of slots for tokens to come in each segment that grows.
        run: how programs are run.
    """
    fixed, behind = {"policy": cache.policy, "mesh": cache.mesh}, {"next_position": cache.length, "rope": cache.rope}
    layers, facts = tuple(cache.entries), facts_of(params.config)
    own = [(np.int32(i), layer.attention, behind) for i, layer in enumerate(params.layers)]
    scores = [run(compared, layer, *own[i], facts=facts[i], **fixed) for i, layer in enumerate(layers)]
    others = [None if held is None else Slots.only(positions=held.positions) for held in beside.entries]
    counts, pool = run(
        divided, layers, scores, others, cache.length, **fixed, windows=cache.windows, rows=rows, room=room
    )
    for i, given in enumerate(zip(layers, scores, counts, beside.entries, strict=True)):
        pool = pool.with_layers(i, run(placed, pool.of_layers(i, 1), given, *own[i], facts=facts[i], **fixed))
    # Later turns compress segments to their own capacities.
    kept = (UNLIMITED,) * len(layers)
    return replace(cache, entries=pool, length=beside.next_position, kept=kept, filled=True)


@partial(jax.jit, static_argnames=("facts", "policy", "mesh"))
def compared(
    layer: Slots,
    index: Int[Array, ""],
    attention: Any,
    behind: dict[str, Any],
    *,
    facts: AttentionLayer,
    policy: Policy,
    mesh: Mesh | None,
) -> Slots:
    """Returns the scores of a layer's entries that the budget compares with those of other layers, as `per_slot`.

    Args:
        index: of the layer in the model.
        attention: of the layer.
        behind: what `over_layers` hands to all layers.
        facts: of the layer, from `facts_of`.
    """
    budget: Any = policy.budget

    def change(records: Sequence[AttentionLayer], layer: Slots, *, heads: Heads, **behind: Any) -> Slots:
        moment = Moment(layer=records[0], heads=heads, **behind)
        scores = policy.rank(layer, moment, None, raised=not budget.layout.compares_protected)
        return Slots.only(per_slot=scores)

    return over_layers(mesh, change, [replace(facts, index=index, **attention.weights)], layer, **behind)


@partial(jax.jit, static_argnames=("policy", "mesh", "windows", "rows", "room"))
def divided(
    layers: Sequence[Slots],
    scores: Sequence[Slots],
    others: Sequence[Slots | None],
    next_position: Int[Array, "B"],
    *,
    policy: Policy,
    mesh: Mesh | None,
    windows: tuple[int | None, ...],
    rows: int,
    room: int,
) -> tuple[list[Slots], Segments]:
    """Returns the number of entries that each head of each layer retains, as `capacity`, and a pool without entries.

    Args:
        others: the positions of what is cached beside them.
        windows: the sliding window of each layer.
        rows, room: as in `allocate`.
    """
    budget: Any = policy.budget

    def change(
        _: Any, given: tuple[Sequence[Slots], Sequence[Slots], Sequence[Any]], *, next_position: Array, heads: Heads
    ) -> tuple[list[Slots], Segments]:
        layers, scores, others = given[0], [layer.per_slot for layer in given[1]], given[2]
        most = max(x.shape[-1] for x in scores)
        padded = [jnp.pad(x, [(0, 0), (0, 0), (0, most - x.shape[-1])], constant_values=-jnp.inf) for x in scores]
        bounds = jnp.array([UNLIMITED if window is None else window for window in windows])
        means = jnp.minimum(jnp.stack([layer.capacity[:, 0] for layer in layers]), bounds[:, None])
        counts = list(budget.allocate(jnp.stack(padded), means, 0 if policy.every is None else policy.minimum, heads))
        lanes, growing = laid_out(policy, len(layers), layers[0].positions.shape[1], heads)
        each = zip(layers, counts, others, strict=True)
        used = [jnp.minimum(n, layer.occupancy) + (0 if own is None else own.occupancy) for layer, n, own in each]
        pool = empty_pool(
            layers[0] if policy.every is not None else layers[0].without_state(),
            tuple(limits(policy, *pair, next_position) for pair in zip(layers, counts, strict=True)),
            tuple(used),
            windows,
            lanes=lanes,
            rows=rows,
            room=room,
            growing=growing,
        )
        return [Slots.only(capacity=count) for count in counts], pool

    return over_layers(mesh, change, [], (layers, scores, others), next_position=next_position)


@partial(jax.jit, static_argnames=("facts", "policy", "mesh"), donate_argnames="pool")
def placed(
    pool: Segments,
    given: tuple[Slots, Slots, Slots, Slots | None],
    index: Int[Array, ""],
    attention: Any,
    behind: dict[str, Any],
    *,
    facts: AttentionLayer,
    policy: Policy,
    mesh: Mesh | None,
) -> Segments:
    """Returns the pool, as it is for one layer, with what each head of the layer retains.

    Args:
        given: the layer, its scores from `compared`, the number of entries of each head from `divided`, and what is
            cached beside them.
        index, attention, behind, facts: as in `compared`.
    """
    budget: Any = policy.budget

    def change(records: Sequence[AttentionLayer], given: Any, *, heads: Heads, **behind: Any) -> Segments:
        pool, (layer, scored, counted, own) = given
        scores, count = scored.per_slot, counted.capacity
        moment = Moment(layer=records[0], heads=heads, **behind)
        # The scores that were compared also choose, unless they depend on what has been allocated by now.
        needs_counts = policy.score.needs.by_count or isinstance(policy.protect.recent, float)
        layer = replace(layer, capacity=count)
        if needs_counts or budget.layout.compares_protected:
            scores = policy.rank(layer, moment, jnp.minimum(count, layer.slots))
        kept = policy.retain(layer, moment, scores, layer.slots)
        if policy.every is None:
            kept = kept.without_state()
        return pool.with_layer(0, kept if own is None else _in_first_slots(kept.append(own)))

    return over_layers(mesh, change, [replace(facts, index=index, **attention.weights)], (pool, given), **behind)


def _in_first_slots(entries: Slots) -> Slots:
    """Returns the same entries in the same order, with all empty slots behind them."""
    return entries.gather(compact(entries.positions >= 0, entries.slots))


def limits(policy: Policy, layer: Slots, count: Int[Array, "B H"], next_position: Int[Array, "B"]) -> Int[Array, "B H"]:
    """Returns the number of entries that each head of a layer may hold while decoding; one that grows has no limit."""
    if policy.every is None:
        return jnp.full_like(count, UNLIMITED)
    # A prompt within the budget leaves all heads alike, to be filled while decoding, unless it has been compressed.
    mean = layer.capacity[:, 0]
    complete = (count >= layer.occupancy) & (count < UNLIMITED)
    within = (next_position <= mean)[:, None] & complete
    return jnp.where(within, mean[:, None], count)
