"""Attention functions for a RaggedCache: what `attention` does for layers of slots, done on segments of a pool.

A decode step reads what segments hold and no more, and scores that judge each entry by itself are asked a piece of
every segment at a time. Where a policy must look at whole segments (`Policy.piecewise` is false), all are laid out as
long as the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import expire, reading, received_from, rotated
from kvjax.cache import LayerCache
from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer
from kvjax.pallas_kernels import PAGE, segment_attention
from kvjax.policy import Policy, mark
from kvjax.protocols import Attended, Moment
from kvjax.ragged import RaggedCache

PIECE = 16 * PAGE  # slots of each segment that are scored at once


def reading_segments(
    policy: Policy,
    positions: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    next_position: Int[Array, "B"],
    *,
    rope: Float[Array, "B R/2"] | None = None,
    slots: int,
    heads: Heads = ALL_HEADS,
) -> Attend:
    """Attention for many new tokens: a layer's segments are laid out as slots, read as such, and put back.

    Args:
        slots: of the layout, enough for the longest segment and the new tokens.
        positions, lengths, next_position, rope, heads: as `attention.reading` takes them.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        pool: RaggedCache,
    ) -> tuple[Float[Array, "B Hq N D"], RaggedCache]:
        i = layer.index
        entries = pool.view(i, 0, slots)
        read = reading(
            policy,
            positions,
            lengths,
            next_position,
            rope=rope,
            slots=[slots] * pool.layers,
            kept=[slots] * pool.layers,
            compress=policy.every is not None,
            final=True,
            heads=heads,
        )
        context, layers = read(layer, q, k, v, (entries,) * pool.layers)
        return context, pool.put(i, layers[i])

    return attend


def decoding_segments(
    policy: Policy,
    positions: Int[Array, "B"],
    incoming: Bool[Array, "B"],
    *,
    rope: Float[Array, "B R/2"] | None = None,
    heads: Heads = ALL_HEADS,
) -> Attend:
    """Attention for one new token a row: make room, write, attend, observe; with `attention.decoding`'s arguments."""
    query_positions = jnp.where(incoming, positions, -1)[:, None]

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq 1 D"],
        k: Float[Array, "B H 1 D"],
        v: Float[Array, "B H 1 D"],
        pool: RaggedCache,
    ) -> tuple[Float[Array, "B Hq 1 D"], RaggedCache]:
        i = layer.index
        moment = Moment(positions, layer, rope, heads)
        unrotated = q
        q, k = (rotated(layer, x, positions[:, None, None], rope) for x in (q, k))
        evicts = policy.evicts(i, pool.layers)
        slot = pool.used[..., i]
        if evicts:
            pool, slot = make_room(policy, pool, moment, incoming)
        slot = jnp.where(incoming[:, None], slot, pool.size[..., i])
        at = jnp.broadcast_to(positions[:, None], k.shape[:2])
        pool = pool.write(i, slot, policy.storage.store(k[:, :, 0]), policy.storage.store(v[:, :, 0]), at)
        wish = policy.score.received if evicts else None
        asking = heads.whole_groups(q) if wish else q
        context, lse = segment_attention(
            asking,
            pool.keys,
            pool.values,
            query_positions,
            pool.positions,
            pool.start[..., i],
            pool.used[..., i],
            scale=layer.scale,
            window=layer.window,
            bias=pool.bias,
        )
        if evicts:
            receive = partial(received_from, wish.reduction, layer, asking, lse, query_positions) if wish else None
            if wish:
                context, lse = heads.own_queries(context), heads.own_queries(lse)
            lengths = incoming.astype(jnp.int32)
            shown = (q, unrotated, query_positions, lse, None, lengths)
            attended = Attended(*shown, layer.scale, layer.window, heads, i, decoding=True)
            pool = _observe(policy, pool, moment, attended, receive)
        return context, pool

    return attend


def make_room(
    policy: Policy, pool: RaggedCache, moment: Moment, incoming: Bool[Array, "B"]
) -> tuple[RaggedCache, Int[Array, "B H"]]:
    """Evicts `every` entries of each head that is full, and finds an empty slot in each segment."""
    assert policy.every is not None
    i, count = moment.layer.index, policy.every
    none = jnp.full(pool.used.shape[:2], pool.positions.shape[2])
    length = PIECE if policy.piecewise else pool.whole
    pieces = (jnp.max(pool.size[..., i]) + length - 1) // length

    def survey(j: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """Counts entries and finds the first slot without one."""
        occupancy, first = found
        entries, slots = _piece(pool, moment, incoming, j, length)
        empty = (entries.positions < 0) & (slots < pool.size[..., i, None])
        return (
            occupancy + entries.occupancy,
            jnp.minimum(first, jnp.min(jnp.where(empty, slots, none[..., None]), axis=-1)),
        )

    occupancy, first = jax.lax.fori_loop(0, pieces, survey, (jnp.zeros_like(none), none))
    full = (occupancy >= pool.capacity[..., i]) & incoming[:, None]

    def judge(j: Array, worst: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """The lowest scores of the pieces so far."""
        entries, slots = _piece(pool, moment, incoming, j, length)
        new = (policy.expendable(entries, moment), entries.positions, jnp.broadcast_to(slots, entries.positions.shape))
        scores, positions, slots = (jnp.concatenate(pair, axis=-1) for pair in zip(worst, new, strict=True))
        victims = policy.select.victims(scores, positions, count)

        def pick(x: Array, missing: float | int) -> Array:
            return jnp.take_along_axis(x, victims, axis=-1, mode="fill", fill_value=missing)

        return pick(scores, jnp.inf), pick(positions, -1), pick(slots, pool.positions.shape[2])

    begin = (
        jnp.full((*none.shape, count), jnp.inf),
        jnp.full((*none.shape, count), -1, jnp.int32),
        jnp.full((*none.shape, count), pool.positions.shape[2], jnp.int32),
    )
    rounds = jnp.where(jnp.any(full), pieces, 0)
    _, _, victims = jax.lax.fori_loop(0, rounds, judge, begin)
    victims = jnp.where(full[..., None], victims, none[..., None])
    slot = jnp.minimum(first, jnp.min(victims, axis=-1))
    if not policy.merge.absorbs:
        return pool.drop(i, victims), slot
    entries, _ = _piece(pool, moment, incoming, jnp.int32(0), pool.whole)
    return pool.put(i, policy.release(entries, moment, mark(victims, pool.whole), count)), slot


def _observe(
    policy: Policy,
    pool: RaggedCache,
    moment: Moment,
    attended: Attended,
    receive: Callable[[LayerCache], Float[Array, "B H S"]] | None,
) -> RaggedCache:
    """The pool after the score was shown a step, piece by piece. State per row is the same for each piece."""
    i = attended.layer
    before = pool.per_row[i]
    length = PIECE if policy.piecewise else pool.whole

    def show(j: Array, pool: RaggedCache) -> RaggedCache:
        entries, _ = _piece(pool, moment, attended.lengths > 0, j, length)
        entries = replace(entries.plain(), per_row=before)
        received = None if receive is None else receive(entries)
        per_slot, per_row = policy.score.observe(entries, replace(attended, received=received))
        return pool.put_state(i, j * (length // PAGE), replace(entries, per_slot=per_slot, per_row=per_row))

    if not jax.tree.leaves(pool.per_slot):
        return show(jnp.int32(0), pool)
    pieces = (jnp.max(pool.used[..., i]) + length - 1) // length
    return jax.lax.fori_loop(0, jnp.maximum(pieces, 1), show, pool)


def _piece(
    pool: RaggedCache, moment: Moment, incoming: Bool[Array, "B"], j: Array, length: int
) -> tuple[LayerCache, Int[Array, "length"]]:
    """The j-th piece of every segment of a layer, without what no later query can see; and its slots."""
    entries = pool.view(moment.layer.index, j * (length // PAGE), length)
    return expire(entries, moment, incoming), j * length + jnp.arange(length)
