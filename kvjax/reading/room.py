"""The number of slots that a cache needs, to read a prompt and for tokens to come: choices on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.attend import ReadPlan
from kvjax.cache import UNLIMITED, Entries, Usage, bucket
from kvjax.checks import LARGEST, is_integer, shown
from kvjax.kv_cache import KVCache, check_cache
from kvjax.mesh.sharding import fetch
from kvjax.policy import Policy, Together
from kvjax.runtime.memory import check_bytes, device_memory, tree_bytes
from kvjax.runtime.modes import own_modes

Compress = Literal["auto", "never", "end", "chunk"]
GIVE_ROOM = "call kvjax.with_room(cache, n) first"


class Ending(NamedTuple):
    """The ending of a call that reads several tokens.

    Attributes:
        compress: whether each layer is compressed to its budget once it has attended.
        allocate: whether the budget is allocated to layers and heads after the call.
        final: whether the prompt ends, so that state that is not needed any more can be forgotten.
    """

    compress: bool
    allocate: bool
    final: bool


def ending(cache: KVCache, compress: Compress) -> Ending:
    """Returns the ending of a call with this `compress`.

    Raises ValueError as `check_compress` does, and for a cache that was read for several policies.
    """
    policy = cache.policy
    check_compress(policy, compress, filled=cache.filled)
    if compress == "auto":
        compresses, final = not cache.filled or policy.every is not None, True
    else:
        compresses, final = compress != "never", compress != "never" or cache.filled
    if compresses and isinstance(policy.score, Together):
        raise ValueError(
            "the cache was read for several policies: expected a call of prefill_each, which compresses it"
        )
    if compresses and policy.allocates and not cache.filled:
        return Ending(compress=False, allocate=True, final=False)
    if cache.entries.preallocates and policy.every is not None:  # heads that evict have slots for their capacity only
        compresses = True
    return Ending(compresses, allocate=False, final=final)


def check_compress(policy: Policy, compress: Compress, *, filled: bool) -> None:
    """Raises ValueError where a cache would be compressed again that its policy can compress only once, or not score.

    Args:
        filled: whether the cache has been compressed.
    """
    again = compress == "chunk" or (compress == "end" and filled)
    if again and (reason := only_once(policy)) is not None:
        raise ValueError(f"compress={compress!r} {reason}: expected 'auto' or 'never'")
    if again and filled and policy.every is None and policy.score.needs.hidden:
        raise ValueError(
            f"compress={compress!r} needs hidden states of earlier tokens, which are not kept; use compress='auto', or "
            "a policy with every=, which keeps their scores"
        )


def only_once(policy: Policy) -> str | None:
    """Returns why a policy cannot compress a cache a second time; None if it can."""
    if policy.allocates:
        return "would allocate the budget to layers and heads more than once"
    if policy.storage.newest is not None:
        return "would settle the entries of a prompt in another form more than once"
    if policy.positions == "in_cache" and policy.score.needs.keeps_queries:
        return "would score by queries that were kept before the keys moved to other places"
    return None


def plan_read(
    cache: KVCache,
    occupied: Sequence[int],
    *,
    new: int,
    room: int,
    compress: bool,
    final: bool,
    spares: bool = False,
) -> ReadPlan:
    """Returns the plan of a call that reads `new` tokens, with `room` slots for tokens to come where a layer grows.

    Args:
        spares: whether rows without a token are not compressed, so that layers stay as large as they are.
    """
    kept = _kept(cache, occupied, new) if compress else (None,) * len(cache.kept)
    whole = tuple(None if most is None else max(most, there) for most, there in zip(kept, occupied, strict=True))
    spares = spares and (cache.policy.every is None or whole != kept)  # else no row holds more than is retained
    kept = whole if spares else kept
    after = partial(cache.entries.slots_after, occupied, new=new, windows=cache.windows)
    rooms, newest = cache.rooms(room), cache.policy.storage.newest
    if room and not compress and not cache.entries.preallocates:
        rooms = _rooms_to_fill(cache, rooms, [there + new for there in occupied])
    if newest is None or not (compress and final):
        return ReadPlan(after(room=rooms, kept=kept), kept, final, spares=spares)
    # The entries of a sliding-window layer leave while an answer grows, and slots of settled ones are never used again.
    retained = after(room=[0] * len(kept), kept=kept)
    settled = [None if window else most for most, window in zip(retained, cache.windows, strict=True)]
    stay = [most if all_of is None else min(newest, all_of) for most, all_of in zip(kept, settled, strict=True)]
    return ReadPlan(after(room=rooms, kept=stay), kept, final, tuple(settled))


def _kept(cache: KVCache, occupied: Sequence[int], new: int) -> tuple[int | None, ...]:
    """Returns the most entries that each layer retains once it has been compressed after `new` more tokens."""
    if cache.policy.budget.pace is None or not cache.filled:
        return cache.kept
    return tuple(bucket(there + cache.policy.rise(new)) for there in occupied)


def _rooms_to_fill(cache: KVCache, rooms: Sequence[int], held: Sequence[int]) -> tuple[int, ...]:
    """Returns the slots that an answer needs behind a prompt that is not compressed.

    A layer that evicts takes tokens until it holds its budget, and a compression would have made the slots for these.

    Args:
        rooms: for tokens to come, of layers that hold their budget.
        held: the most entries of each layer after the prompt, which is all of it.
    """
    most = (cache.policy.slots(i, size, len(held)) or 0 for i, size in enumerate(held))
    each = zip(rooms, held, most, cache.grows, strict=True)
    return tuple(room if grows else room + max(0, slots - size) for room, size, slots, grows in each)


def check_fits(cache: KVCache, size: Sequence[int]) -> None:
    """Raises MemoryError if the entries of a cache with this many slots, as `grow` takes them, exceed the devices."""
    first = cache.entries.stored[0]
    if isinstance(first, jax.core.Tracer) or not isinstance(first, jax.Array):
        return
    most = device_memory(first.sharding.addressable_devices)
    devices, widest = 1 if cache.mesh is None else cache.mesh.size, max(H * (D + 16) for H, D in cache.entries.heads)
    per_slot = 32 * first.shape[0] * widest  # more than any storage and state take, and known without a trace
    if most is None or sum(size) * per_slot <= most:
        return
    entries = jax.eval_shape(lambda: cache.entries.grow(tuple(size)))
    check_bytes("the cache", tree_bytes(entries) // devices, most)


@jax.jit
def _usage(entries: Entries) -> Int[Array, "2 L"]:
    occupied, free = entries.usage()
    return jnp.stack([jnp.max(occupied, axis=0), jnp.min(free, axis=0)])


def usage(cache: KVCache) -> Usage:
    """Returns how full each layer is in its fullest row, as integers on the host. It waits for one transfer."""
    if not any(cache.entries.bounds):  # no program is needed for that
        return Usage([0] * len(cache.entries), [0] * len(cache.entries))
    return Usage(*fetch(_usage(cache.entries)).tolist())


def occupied_slots(cache: KVCache) -> list[int]:
    """Returns the most slots that any row and head of each layer occupies, or will once it is full.

    Of a cache of shapes, as many as there may be.
    """
    if isinstance(cache.length, jax.ShapeDtypeStruct):
        return list(cache.entries.bounds)
    return list(usage(cache).occupied)


@partial(jax.jit, static_argnames="size")
def grown(cache: KVCache, size: tuple[int, ...]) -> KVCache:
    """Returns the same cache with more slots, as `Entries.growth` counts them."""
    return replace(cache, entries=cache.entries.grow(size)).in_place()


@own_modes()
def with_room(cache: KVCache, room: int) -> KVCache:
    """Gives every layer or head that grows the empty slots for at least `room` decode steps.

    It copies keys and values if there are fewer.

    Raises:
        ValueError: for what is no cache, or a `room` that is not in 0 .. 2**31 - 1.
        MemoryError: the devices cannot hold it.
    """
    check_cache(cache)
    if not is_integer(room) or not 0 <= room <= LARGEST:
        raise ValueError(f"room={shown(room)}: expected an integer in 0 .. {LARGEST}")
    size = cache.entries.growth(usage(cache), cache.rooms(int(room)), windows=cache.windows)
    if size is None:
        return cache
    check_fits(cache, size)
    return grown(cache, size=size)


def check_room(cache: KVCache, new: int) -> None:
    """Raises ValueError if a layer or head that grows cannot take `new` more tokens.

    It waits for the device only if there is one.
    """
    filling = cache.entries.filling(cache.grows, cache.windows)
    if any(filling):
        for i, (fills, free) in enumerate(zip(filling, usage(cache).free, strict=True)):
            if fills and free < new:
                raise ValueError(f"layer {i} has room for {free} tokens, not {new}; {GIVE_ROOM}")
    elif cache.policy.budget.pace is not None and (free := int(np.min(fetch(free_room(cache))))) < new:
        raise ValueError(f"the cache has room for {free} tokens, not {new}; {GIVE_ROOM}")


@jax.jit
def free_room(cache: KVCache) -> Int[Array, "B"]:
    """Returns the number of tokens that every layer and head of a row can take; UNLIMITED if none grows."""
    filling = np.array(cache.entries.filling(cache.grows, cache.windows))
    free = jnp.min(jnp.where(filling, cache.entries.usage().free, UNLIMITED), axis=1)
    if cache.policy.budget.pace is None:
        return free
    each = zip(cache.entries.bounds, cache.grows, cache.windows, strict=True)
    evict = [slots for slots, grows, window in each if not grows and slots != window]
    return jnp.minimum(free, cache.policy.longest(min(evict)) - cache.length) if evict else free


def check_reading(chunk: int | None, compress: Compress) -> None:
    """Raises ValueError for a `chunk` or `compress` that is not accepted."""
    if compress not in get_args(Compress):
        raise ValueError(f"compress={shown(compress)}: expected one of {', '.join(map(repr, get_args(Compress)))}")
    if chunk is not None and (not is_integer(chunk) or chunk < 1):
        raise ValueError(f"chunk={shown(chunk)}: expected a number of tokens >= 1, or None for the prompt in one piece")
    if compress == "chunk" and chunk is None:
        raise ValueError("compress='chunk' needs chunk=, the number of tokens to read at a time")
