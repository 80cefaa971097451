"""Which entry another one went into, where a policy merges. A cache does not remember it, but what it does tells.

A merged value is a weighted sum of values, with weights that do not depend on them. So the derivative of what an entry
becomes, by the value of another one, is what it took of that one: one backward pass tells it for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import expire
from kvjax.cache import KVCache
from kvjax.extend import plan_slots
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.protocols import AS_THEY_ARE, Merge, Moment
from kvjax.segments import make_room
from kvjax.sharing import pool_rows, share_out
from kvjax.sweep import compressed

NOWHERE, SEVERAL = -1, -2  # in place of a position


def merges(policy: Policy) -> bool:
    """Whether anything goes into other entries under a policy."""
    hooks = ("condense", "absorb_rest", "absorb")
    return any(getattr(type(policy.merge), hook) is not getattr(Merge, hook) for hook in hooks)


def into_at_prompt(params: Decoder, whole: KVCache) -> tuple[Int[Array, "B H S"], ...]:
    """For each entry of a prompt that has been read and not yet compressed, the position that it will be part of.

    An entry that is kept as it is goes into itself, NOWHERE is one that will be dropped, SEVERAL of one that is shared.
    """
    policy = whole.policy
    if policy.shares:
        rows = pool_rows(policy, whole.kept, params.config.num_kv_heads, room=0)
        return _at_prompt(params, whole, rows=rows, slots=())
    slots = plan_slots(whole, [layer.slots for layer in whole.layers], new=0, room=0, compress=True)
    return _at_prompt(params, whole, rows=0, slots=slots)


@partial(jax.jit, static_argnames=("rows", "slots"))
def _at_prompt(params: Decoder, whole: KVCache, *, rows: int, slots: tuple[int, ...]) -> tuple[Array, ...]:
    cache = _plain(whole)
    if cache.policy.shares:
        return _followed(partial(share_out, params, rows=rows, room=0), cache)
    return _followed(partial(compressed, params, slots=slots), cache)


@jax.jit
def into_at_step(params: Decoder, cache: KVCache) -> tuple[Int[Array, "B H S"], ...] | Int[Array, "B P T"]:
    """The same of the entries before a decode step of every row, which may make room."""
    return _followed(partial(_made_room, params), _plain(cache))


def _made_room(params: Decoder, cache: KVCache) -> KVCache:
    policy, layers, pool = cache.policy, list(cache.layers), cache.pool
    incoming: Bool[Array, "B"] = jnp.ones(cache.length.shape, bool)
    for i, record in enumerate(params.attention_layers):
        moment = Moment(cache.length, record, cache.rope)
        if pool is None and not policy.grows(i):
            layers[i] = policy.make_room(expire(layers[i], moment, incoming), moment, incoming)
        elif pool is not None and policy.evicts(i, len(params.attention_layers)):
            pool, _ = make_room(policy, pool, moment, incoming)
    return replace(cache, layers=tuple(layers), pool=pool)


def _plain(cache: KVCache) -> KVCache:
    """The same with values in float32, and nothing packed."""

    def widen(entries: Any) -> Any:
        return replace(entries, values=entries.values.astype(jnp.float32))

    policy = replace(cache.policy, storage=AS_THEY_ARE)
    if cache.pool is not None:
        return replace(cache, policy=policy, pool=widen(cache.pool))
    return replace(cache, policy=policy, layers=tuple(widen(layer.plain()) for layer in cache.layers))


def _followed(change: Callable[[KVCache], KVCache], cache: KVCache) -> Any:
    """Where each entry of a cache is after a change of it."""

    def values(cache: KVCache) -> Any:
        return cache.pool.values if cache.pool is not None else tuple(layer.values for layer in cache.layers)

    def changed(before: Any) -> tuple[Any, Any]:
        if cache.pool is not None:
            after = change(replace(cache, pool=replace(cache.pool, values=before)))
        else:
            pairs = zip(cache.layers, before, strict=True)
            after = change(replace(cache, layers=tuple(replace(layer, values=x) for layer, x in pairs)))
        if after.pool is not None:
            return after.pool.values, after.pool.positions
        return values(after), tuple(layer.positions for layer in after.layers)

    after, back, positions = jax.vjp(changed, values(cache), has_aux=True)
    (taken,) = back(jax.tree.map(_marked, after, positions))
    return jax.tree.map(_position, taken)


def _marked(values: Float[Array, "*B S D"], positions: Int[Array, "*B S"]) -> Float[Array, "*B S D"]:
    """In three channels, what a backward pass sums by weight: 1, the position, and a hash of it."""
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
