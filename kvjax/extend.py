"""The one verb: extending a cache by tokens. Reading a prompt, decoding, the next turn of a dialogue are all that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import decoding, reading
from kvjax.cache import KVCache
from kvjax.clock import Clock
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.protocols import UNLIMITED
from kvjax.ragged import whole_pages
from kvjax.replay import ReplayScore, Texts, replay
from kvjax.segments import decoding_segments, reading_segments
from kvjax.sharding import fetch, logical_sharding, mesh_of, rows_sharding
from kvjax.sharing import growing, pool_rows, share_out
from kvjax.spread import over_heads

Compress = Literal["auto", "never", "end", "chunk"]
Run: TypeAlias = Callable[..., Any]


def run_at_once(program: Run, *args: Any, **kwargs: Any) -> Any:
    """Runs a program, and counts nothing."""
    return program(*args, **kwargs)


def bucket(size: int) -> int:
    """The padded size for `size` tokens: 16, 24, 32, 48, 64, 96, ... so that few programs serve all lengths."""
    power = 16
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def extend(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"] | None = None,
    policy: Policy | None = None,
    *,
    compress: Compress = "auto",
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by up to N tokens a row. Pure: usable inside `jax.jit`, and the given cache is left as it was.

    One token into a filled cache is a decode step: make room, write, attend, observe. Several tokens attend to what is
    cached and causally to themselves, and the cache is then compressed to its budget.

    Args:
        tokens: right-aligned: row b's tokens are the last `lengths[b]` of its N.
        lengths: tokens of each row, 0 .. N; a row of length 0 is left as it is. All N by default.
        policy: may be given as a check; it must be the cache's own.
        compress: "auto" compresses a cache that is being filled, or whose policy evicts while decoding; "end" always;
            "never" appends, and more of the prompt may follow ("chunk" as well, but compresses).

    Returns:
        Float32 logits after each row's last token (of no meaning for a row of length 0), and the new cache.

    Raises:
        ValueError: for another policy or mesh, tokens or lengths of a wrong shape, lengths beyond the tokens, or a
            decode step into a cache without room. Under `jax.jit` room is the caller's to provide: see `with_room`.
    """
    check_policy(cache, policy)
    check_mesh(cache, params)
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[0] != cache.batch_size or tokens.shape[1] < 1:
        raise ValueError(f"tokens have shape {tokens.shape}; accepted is [{cache.batch_size}, N] with N >= 1")
    check_reading(tokens.shape[1], compress)
    lengths = jnp.full(tokens.shape[0], tokens.shape[1]) if lengths is None else jnp.asarray(lengths)
    concrete = not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((cache, tokens, lengths)))
    if lengths.shape != cache.length.shape or (
        concrete and not (0 <= int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1])
    ):
        raise ValueError(
            f"lengths={lengths} of {tokens.shape[1]} columns; accepted are {cache.batch_size} in 0 .. {tokens.shape[1]}"
        )
    if concrete:
        tokens, lengths = map(cache.put_rows, (tokens, lengths))
    if tokens.shape[1] == 1 and cache.filled and compress == "auto":
        if concrete:
            check_room(cache, 1)
        return _step(params, cache, tokens[:, 0], lengths > 0)
    how = resolve(cache, compress)
    if concrete:
        occupied = occupied_slots(cache)
        cache = with_room(cache, tokens.shape[1]) if cache.pool is not None else cache
    else:
        occupied = (
            [cache.pool.positions.shape[2]] if cache.pool is not None else [layer.slots for layer in cache.layers]
        )
    slots = plan_slots(cache, occupied, new=tokens.shape[1], room=0, compress=how.compress)
    logits, cache = jitted_read(params, cache, tokens, lengths, slots=slots, compress=how.compress, final=how.final)
    if how.share:
        cache = _shared_out(params, cache, tokens, lengths, room=0, texts=None, begins=not any(occupied))
    return logits, cache


def read(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    slots: tuple[int, ...],
    compress: bool,
    final: bool,
) -> tuple[Float[Array, "B V"], KVCache]:
    """`extend` by several tokens, every choice made: slots of each layer after it, and whether to compress."""
    count = tokens.shape[1]
    behind = jnp.arange(count - 1, -1, -1)
    next_position = cache.length + lengths
    positions = jnp.where(behind < lengths[:, None], next_position[:, None] - 1 - behind, -1)
    if cache.pool is None:
        make = partial(reading, cache.policy, slots=slots, kept=cache.kept, compress=compress, final=final)
    else:
        make = partial(reading_segments, cache.policy, slots=max(slots))
    rows = {"positions": positions, "lengths": lengths, "next_position": next_position, "rope": cache.rope}
    hidden, entries = params(tokens, over_heads(cache.mesh, make, **rows), cache.entries)
    cache = replace(cache.with_entries(entries), length=next_position, filled=cache.filled or final)
    return _by_row(params.logits(hidden[:, -1]), cache), cache.in_place()


def step(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B"], incoming: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """`extend` by one token in the rows where one is incoming; the others are left as they are."""
    rows = {"positions": cache.length, "incoming": incoming, "rope": cache.rope}
    make = partial(decoding if cache.pool is None else decoding_segments, cache.policy)
    hidden, entries = params(tokens[:, None], over_heads(cache.mesh, make, **rows), cache.entries)
    cache = replace(cache.with_entries(entries), length=cache.length + incoming)
    return _by_row(params.logits(hidden[:, 0]), cache), cache.in_place()


def _by_row(logits: Float[Array, "B V"], cache: KVCache) -> Float[Array, "B V"]:
    """Whole rows of logits on each device that has a share of the batch, for samplers to look at."""
    if cache.mesh is None:
        return logits
    # They are gathered as logits: asked for whole rows at once, XLA gathers the unembedding.
    cut = logical_sharding(cache.mesh, ("batch", "vocab"), logits.shape)
    logits = jax.lax.with_sharding_constraint(logits, cut)
    return jax.lax.with_sharding_constraint(logits, rows_sharding(cache.mesh))


class How(NamedTuple):
    """How a call ends.

    Attributes:
        compress: each layer to its budget, when it has attended.
        share: the budget is shared out among layers and heads after it.
        final: the prompt ends with it, so that state that is not needed any more can be forgotten.
    """

    compress: bool
    share: bool
    final: bool


jitted_read = jax.jit(read, static_argnames=("slots", "compress", "final"))
_read_on = jax.jit(read, static_argnames=("slots", "compress", "final"), donate_argnames="cache")
_step = jax.jit(step)
_replay = jax.jit(replay)
_share_out = jax.jit(share_out, static_argnames=("rows", "room"))
_passes = jax.jit(
    lambda score, tokens, lengths, texts: score.passes(tokens, lengths, texts), static_argnames=("score", "texts")
)


def read_prompt(
    params: Decoder,
    cache: KVCache,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[np.ndarray, "B"],
    *,
    room: int,
    chunk: int | None,
    compress: Compress,
    texts: Texts | None = None,
    clock: Clock | None = None,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by a whole prompt, in chunks if asked, and leaves room for `room` tokens to be decoded.

    Rows end together in the last chunk. Between chunks nothing is compressed, so that the result is that of one call,
    unless `compress` is "chunk". A turn into a pool of segments is read in one piece. The clock counts the programs
    run as "prefill".

    Args:
        texts: token ids that a score by replay needs, see `ReplayScore.texts`.
    """
    run, put = partial((clock or Clock()).run, "prefill"), cache.put_rows
    if tokens.shape[1] == 1 and cache.filled and compress == "auto":
        return run(_step, params, with_room(cache, room), put(tokens[:, 0]), put(lengths > 0))
    how, whole, whole_lengths = resolve(cache, compress), tokens, lengths
    occupied = begun = occupied_slots(cache)
    if cache.pool is not None:
        cache, chunk = with_room(cache, tokens.shape[1] + room), None
    chunk = min(chunk or tokens.shape[1], tokens.shape[1])
    chunks = -(-tokens.shape[1] // chunk)
    tokens = np.pad(tokens, ((0, 0), (chunks * chunk - tokens.shape[1], 0)))
    if chunks > 1:
        between = plan_slots(cache, occupied, new=(chunks - 1) * chunk, room=0, compress=compress == "chunk")
        cache = _grow(cache, between)
    for i in range(chunks):
        rest = (chunks - 1 - i) * chunk
        part, part_lengths = put(tokens[:, i * chunk : (i + 1) * chunk]), put(np.clip(lengths - rest, 0, chunk))
        if rest:
            go = _read_on if i else jitted_read  # the first cache is the caller's
            _, cache = run(
                go, params, cache, part, part_lengths, slots=between, compress=compress == "chunk", final=False
            )
            occupied = occupied_slots(cache)
    slots = plan_slots(cache, occupied, new=chunk, room=0 if how.share else room, compress=how.compress)
    logits, cache = run(
        jitted_read, params, cache, part, part_lengths, slots=slots, compress=how.compress, final=how.final
    )
    if how.share:
        cache = _shared_out(params, cache, put(whole), put(whole_lengths), room, texts, not any(begun), run)
    return logits, cache


def resolve(cache: KVCache, compress: Compress) -> How:
    """Raises ValueError where a policy's budget is shared out once, and this would be another time."""
    if cache.policy.shares and (compress == "chunk" or (compress == "end" and cache.filled)):
        raise ValueError(
            f"compress={compress!r} would share {type(cache.policy.budget).__name__} out more than once; accepted are "
            "'auto' and 'never'"
        )
    if compress == "auto":
        compresses, final = not cache.filled or cache.policy.every is not None, True
    else:
        compresses, final = compress != "never", compress != "never" or cache.filled
    if compresses and cache.policy.shares and not cache.filled:
        return How(compress=False, share=True, final=False)
    return How(compresses, share=False, final=final)


def _shared_out(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    room: int,
    texts: Texts | None,
    begins: bool,
    run: Run = run_at_once,
) -> KVCache:
    """The cache of a prompt that has been read, its budget shared out, after whatever its score wants replayed.

    Args:
        begins: whether these tokens are all of the prompt, as a score by replay needs them.
        run: how programs are run.
    """
    cache.policy.score.check_whole(begins)
    return shared_out(params, replayed(params, cache, tokens, lengths, texts, run), room, begins, run)


def replayed(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    texts: Texts | None,
    run: Run,
) -> KVCache:
    """The cache of a prompt, whose tokens these are, after whatever its score wants replayed."""
    score = cache.policy.score
    if isinstance(score, ReplayScore):
        for part in _passes(score, tokens, lengths, score.texts(None) if texts is None else texts):
            cache = run(_replay, params, cache, jax.tree.map(cache.put_rows, part))
    return cache


def shared_out(params: Decoder, cache: KVCache, room: int, begins: bool, run: Run) -> KVCache:
    """The cache of a prompt that has been read and scored, its budget shared out."""
    kept = cache.kept
    if not begins:  # the text may be longer than the prompt that the cache was made for
        held = (cache.policy.slots(i, layer.slots, len(kept)) for i, layer in enumerate(cache.layers))
        kept = tuple(max(most or 0, now or 0) for most, now in zip(kept, held, strict=True))
    rows = pool_rows(cache.policy, kept, params.config.num_kv_heads, room)
    cache = run(_share_out, params, cache, rows=rows, room=room)
    assert cache.pool is not None
    if cache.policy.every is None or cache.policy.piecewise or isinstance(cache.length, jax.core.Tracer):
        return cache
    longest = whole_pages(bucket(int(fetch(_longest(cache)))))
    return replace(cache, pool=replace(cache.pool, longest=longest))


def plan_slots(cache: KVCache, occupied: Sequence[int], *, new: int, room: int, compress: bool) -> tuple[int, ...]:
    """Slots of each layer after reading `new` tokens, with room for `room` more where the layer grows."""
    if cache.pool is not None:
        return (whole_pages(bucket(max(occupied) + new)),)
    slots = []
    for i, (layer, kept, window) in enumerate(zip(cache.layers, cache.kept, cache.windows, strict=True)):
        room_here = room if cache.policy.grows(i) else 0
        if compress and kept is not None:
            needed = kept + room_here
        else:
            needed = occupied[i] + new + room_here
            if needed <= layer.slots:
                needed = layer.slots
            elif occupied[i]:
                needed = bucket(needed)
        slots.append(needed if window is None else min(needed, window))
    return tuple(slots)


@jax.jit
def _occupied(cache: KVCache) -> Int[Array, "L"]:
    if cache.pool is not None:
        bounded = jnp.where(cache.pool.capacity < UNLIMITED, cache.pool.capacity, 0)
        return jnp.max(jnp.maximum(cache.pool.used, bounded), axis=(0, 1))
    return jnp.stack([jnp.max(layer.occupancy, initial=0) for layer in cache.layers])


def occupied_slots(cache: KVCache) -> list[int]:
    """The most slots that any row and head of each layer occupies, or will when it is full."""
    if cache.pool is None and all(layer.slots == 0 for layer in cache.layers):
        return [0] * len(cache.layers)
    return [int(count) for count in fetch(_occupied(cache))]


@partial(jax.jit, static_argnames=("room", "segments"))
def _grow_segments(cache: KVCache, room: int, segments: int) -> KVCache:
    assert cache.pool is not None
    return replace(cache, pool=cache.pool.grow(room, segments)).in_place()


@jax.jit
def _longest(cache: KVCache) -> Int[Array, ""]:
    """Rows of the longest segment of those that decoding evicts from."""
    assert cache.pool is not None
    layers = cache.pool.layers
    return jnp.max(cache.pool.size[..., [i for i in range(layers) if cache.policy.evicts(i, layers)]], initial=0)


@jax.jit
def _room(cache: KVCache) -> Int[Array, ""]:
    """Empty rows of the fullest segment of those that grow."""
    pool = cache.pool
    assert pool is not None
    return jnp.min(jnp.where(pool.capacity < UNLIMITED, UNLIMITED, pool.size - pool.used))


@partial(jax.jit, static_argnames="slots")
def _grow(cache: KVCache, slots: tuple[int, ...]) -> KVCache:
    layers = tuple(layer.grow(n) for layer, n in zip(cache.layers, slots, strict=True))
    return replace(cache, layers=layers).in_place()


def with_room(cache: KVCache, room: int) -> KVCache:
    """The same cache with at least `room` empty slots in every layer that grows, for as many decode steps."""
    if cache.pool is not None:
        lack = room - int(fetch(_room(cache)))
        segments = growing(cache.policy, cache.pool.layers, cache.pool.start.shape[1] // cache.pool.lanes)
        return cache if lack <= 0 else _grow_segments(cache, room=bucket(lack), segments=segments)
    occupied = occupied_slots(cache)
    slots = plan_slots(cache, occupied, new=0, room=room, compress=False)
    return cache if slots == tuple(layer.slots for layer in cache.layers) else _grow(cache, slots)


def check_room(cache: KVCache, new: int) -> None:
    """Raises ValueError if a growing layer cannot take `new` more tokens."""
    if cache.pool is not None:
        room = int(fetch(_room(cache)))
        if room < new:
            raise ValueError(
                f"the fullest segment has room for {room} tokens, not {new}; call kvjax.with_room(cache, n) first"
            )
        return
    for i, (layer, occupied) in enumerate(zip(cache.layers, occupied_slots(cache), strict=True)):
        if cache.policy.grows(i) and layer.slots != cache.windows[i] and occupied + new > layer.slots:
            raise ValueError(
                f"layer {i} holds {occupied} tokens in {layer.slots} slots and has no room for {new} more; "
                "call kvjax.with_room(cache, n) first"
            )


def check_reading(chunk: int | None, compress: Compress) -> None:
    """Raises ValueError for a way of reading a prompt that there is not."""
    if compress not in get_args(Compress):
        raise ValueError(f"compress={compress!r}; accepted are {', '.join(map(repr, get_args(Compress)))}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int | np.integer) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}; accepted is a number of tokens >= 1, or None for the prompt in one piece")
    if compress == "chunk" and chunk is None:
        raise ValueError("compress='chunk' needs chunk=, the number of tokens to read at a time")


def check_policy(cache: KVCache, policy: Policy | None) -> None:
    """Raises ValueError unless `policy` is None or the one that made the cache."""
    if policy is not None and policy != cache.policy:
        raise ValueError(f"this cache was made by {cache.policy} and cannot be extended with {policy}")


def check_mesh(cache: KVCache, params: Decoder) -> None:
    """Raises ValueError unless cache and parameters are spread over the same mesh. Under `jax.jit` that is not seen."""
    traced = isinstance(jax.tree.leaves(params)[0], jax.core.Tracer)
    if not traced and cache.mesh != mesh_of(params):
        raise ValueError(
            f"the cache lies on {cache.mesh or 'one device'}, the parameters on {mesh_of(params) or 'one device'}; "
            "accepted is the same for both"
        )
