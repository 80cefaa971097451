"""Finds the entry that another one went into, where a policy merges.

The cache does not record it. But a merged value is a weighted sum of values, with weights that do not depend on them.
The derivative of a retained value by a value before the merge is therefore the weight of that value in it, and one
backward pass gives the weights of all entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attend import ReadPlan, RoomMaker, expired, finished, met_keys
from kvjax.cache import Entries, Layers, Segments, Slots
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import PLAIN, Moment
from kvjax.reading.allocate import allocate, pool_rows
from kvjax.reading.beside import Beside, with_learned
from kvjax.reading.room import plan_read

NOWHERE = -1
"""Stands for the position of an entry that was dropped."""
SEVERAL = -2
"""Stands for the positions of several entries, between which a value was divided."""


def into_at_prompt(params: Decoder, full: KVCache) -> Any:
    """For each entry of a prompt that has been read and not yet compressed, the position that it will be part of.

    An entry that is retained as it is goes into itself. NOWHERE stands for a dropped one, SEVERAL for one whose value
    goes into several others. The result is a list as `Entries.by_head` takes it.
    """
    policy = full.policy
    if policy.allocates:
        rows = pool_rows(full, room=0)
        return _at_prompt(params, full, rows=rows, plan=None)
    stored = replace(full, policy=replace(policy, storage=PLAIN))
    plan = plan_read(stored, full.entries.bounds, new=0, room=0, compress=True, final=True)
    return _at_prompt(params, full, rows=0, plan=plan)


@partial(jax.jit, static_argnames=("rows", "plan"))
def _at_prompt(params: Decoder, full: KVCache, *, rows: int, plan: ReadPlan | None) -> Any:
    cache = _plain(full)
    if plan is None:
        return _followed(partial(_allocated, params, rows=rows), cache)
    return _followed(partial(_compressed, params, plan=plan), cache)


def _allocated(params: Decoder, cache: KVCache, *, rows: int) -> KVCache:
    paid, _ = with_learned(params, cache)
    return allocate(params, paid, Beside.nothing(paid), rows=rows, room=0)


def _compressed(params: Decoder, cache: KVCache, *, plan: ReadPlan) -> KVCache:
    done = []
    for i, (record, entries) in enumerate(zip(params.attention_layers, cache.entries, strict=True)):
        moment = Moment(cache.length, record, cache.rope)
        met = None if plan.kept[i] is None else met_keys(cache.policy, entries, moment)
        entries = expired(entries, moment, cache.length > 0)
        done.append(finished(cache.policy, entries, moment, met, plan, i))
    return replace(cache, entries=Layers(tuple(done)), filled=True)


@jax.jit
def into_at_step(params: Decoder, cache: KVCache) -> Any:
    """The same for the entries before a decode step of every row, which may make room."""
    return _followed(partial(_made_room, params), _plain(cache))


def _made_room(params: Decoder, cache: KVCache) -> KVCache:
    entries, incoming = cache.entries, jnp.ones(cache.length.shape, bool)
    limits = cache.policy.limits(len(entries))
    for i, record in enumerate(params.attention_layers):
        room = RoomMaker.of(cache.policy, Moment(cache.length, record, cache.rope), incoming, limits)
        entries, _ = entries.make_room(i, incoming, room)
    return replace(cache, entries=entries)


def _plain(cache: KVCache) -> KVCache:
    """The same cache with keys and values as arrays, values in float32."""
    parts, tree = _parts(cache.entries)
    arrays = [part.plain() for part in parts]
    wide = [replace(part, values=part.values.astype(jnp.float32)) for part in arrays]
    return replace(cache, policy=replace(cache.policy, storage=PLAIN), entries=tree.unflatten(wide))


def _parts(entries: Entries) -> tuple[list[Slots | Segments], Any]:
    """Returns what holds keys, values and positions, slots by layer or the pool, and the rest of the pytree."""
    return jax.tree.flatten(entries, is_leaf=lambda x: isinstance(x, Slots | Segments))


def _followed(change: Callable[[KVCache], KVCache], cache: KVCache) -> Any:
    """Returns where each entry of a cache is after a change."""

    parts, tree = _parts(cache.entries)

    def changed(values: list[Array]) -> tuple[list[Array], list[Array]]:
        given = tree.unflatten([replace(part, values=new) for part, new in zip(parts, values, strict=True)])
        after, _ = _parts(change(replace(cache, entries=given)).entries)
        return [part.values for part in after], [part.positions for part in after]

    after, back, positions = jax.vjp(changed, [part.values for part in parts], has_aux=True)
    (taken,) = back(jax.tree.map(_marked, after, positions))
    return jax.tree.map(_position, taken)


def _marked(values: Float[Array, "*B S D"], positions: Int[Array, "*B S"]) -> Float[Array, "*B S D"]:
    """Three channels that a backward pass sums by weight: 1, the position, and a hash of the position."""
    marks = jnp.stack([jnp.ones(positions.shape), positions, jnp.cos(positions)], axis=-1)
    marks = jnp.where((positions >= 0)[..., None], marks, 0)
    return jnp.zeros_like(values).at[..., :3].set(marks)


def _position(taken: Float[Array, "*B S D"]) -> Int[Array, "*B S"]:
    weight, position, hashed = (taken[..., i] for i in range(3))
    there = jnp.abs(weight) > 0
    weight = jnp.where(there, weight, 1.0)
    nearest = jnp.round(position / weight)
    single = jnp.abs(hashed / weight - jnp.cos(nearest)) < 1e-3
    return jnp.where(there, jnp.where(single, nearest, SEVERAL), NOWHERE).astype(jnp.int32)
