"""What follows a prompt that all layers have read: replays for its score, and the allocation of its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attend import over_heads, over_layers, positions_behind, replaying
from kvjax.cache import UNLIMITED, Entries, Layers, Segments
from kvjax.clock import Run, run_at_once
from kvjax.heads import Heads
from kvjax.kv_cache import KVCache
from kvjax.layerwise import replay_by_layers, replay_pays
from kvjax.mix import over_experts
from kvjax.models import AttentionLayer, Decoder
from kvjax.pallas_kernels import PAGE
from kvjax.policy import Moment, Pass, Policy, Texts
from kvjax.programs import jit
from kvjax.sensitivity import replayed_backwards
from kvjax.shown import shown

Encode: TypeAlias = Callable[[str], Sequence[int]]


def encoded_texts(policy: Policy, encode: Encode | None) -> Texts:
    """The token ids of the texts that the policy's score replays.

    Raises ValueError for a text where there is no tokenizer to encode it.
    """
    return tuple(_ids(text, encode, type(policy.score).__name__) for text in policy.score.needs.texts)


def _ids(text: str | tuple[int, ...], encode: Encode | None, score: str) -> tuple[int, ...]:
    if not isinstance(text, str):
        return tuple(text)
    if encode is None and text:
        raise ValueError(
            f"{score} replays the text {shown(text)} and there is no tokenizer: expected tokenizer= or token ids"
        )
    return tuple(encode(text)) if encode is not None and text else ()


def replayed(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    texts: Texts | None,
    run: Run = run_at_once,
) -> KVCache:
    """The cache of a prompt, whose tokens these are, after every pass that its score asks for.

    Args:
        tokens: right-aligned.
        texts: as `encoded_texts` gives them; None if the score's texts are token ids already.
        run: how programs are run.
    """
    score = cache.policy.score
    texts = encoded_texts(cache.policy, None) if texts is None else texts
    for part in passes(score, tokens, lengths, texts):
        part = jax.tree.map(cache.put_rows, part)
        if replay_pays(params, cache):
            cache = replay_by_layers(params, cache, part, run=run)
        else:
            cache = run(replay, params, cache, part)
    return cache


passes = jit(
    lambda score, tokens, lengths, texts: score.passes(tokens, lengths, texts), static_argnames=("score", "texts")
)


@jit
def replay(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    """The same cache after its score has observed a pass."""
    positions = positions_behind(cache.length, part.lengths, part.tokens.shape[1])
    rows = {"positions": positions, "lengths": part.lengths, "first": part.first, "last": part.last, "rope": cache.rope}
    needs = cache.policy.score.needs
    observing = partial(over_heads, cache.mesh, partial(replaying, cache.policy), hidden=needs.hidden, **rows)
    if needs.sensitivity:
        entries = replayed_backwards(params, cache, part.tokens, positions, observing)
    else:
        _, entries = params(part.tokens, observing(), cache.entries, over_experts(cache.mesh))
    return replace(cache, entries=entries).in_place()


def check_one_call(policy: Policy, begins: bool) -> None:
    """Raises ValueError if the score replays a prompt and this call, which does not begin it, is not all of it."""
    if policy.score.needs.whole_prompt and not begins:
        raise ValueError(
            f"{type(policy.score).__name__} replays the prompt: expected a prompt that is read in one call"
        )


def allocated(params: Decoder, cache: KVCache, room: int, begins: bool, run: Run = run_at_once) -> KVCache:
    """The cache of a prompt that has been read and replayed, in a pool with each head's own number of entries.

    Args:
        room: the number of slots for tokens to come in each segment that grows.
        begins: whether the prompt was read in one call, so that it is as long as the cache was made for.
        run: how programs are run.
    """
    policy, kept, layers = cache.policy, cache.kept, len(cache.kept)
    if not begins:
        held = (policy.slots(i, slots, layers) for i, slots in enumerate(cache.entries.bounds))
        kept = tuple(max(most or 0, now or 0) for most, now in zip(kept, held, strict=True))
    rows = pool_rows(policy, kept, params.config.num_kv_heads, room)
    cache = run(allocate, params, cache, rows=rows, room=room)
    if not shows_whole_segments(policy) or isinstance(cache.length, jax.core.Tracer):
        return cache
    evicting = tuple(i for i in range(layers) if policy.evicts(i, layers))
    return replace(cache, entries=cache.entries.bounded(evicting))


def shows_whole_segments(policy: Policy) -> bool:
    """Whether decoding lays segments out as long as the longest one that it evicts from."""
    return policy.every is not None and not policy.piecewise


def pool_rows(policy: Policy, kept: Sequence[int | None], kv_heads: int, room: int) -> int:
    """The rows of a lane of the pool: the budget, PAGE - 1 more per segment, and room where segments grow."""
    budget: Any = policy.budget
    heads = kv_heads // budget.layout.lanes(kv_heads)
    slots = [count for count in kept if count is not None]
    growing = growing_segments(policy, len(kept), heads)
    return budget.entries(slots, heads) + len(kept) * heads * (PAGE - 1) + room * growing


def growing_segments(policy: Policy, layers: int, heads: int) -> int:
    """The number of segments of a lane with `heads` heads that grow while decoding."""
    layout = policy.budget.layout
    assert layout is not None
    return layers * heads if policy.every is None else layout.growing_segments(layers, heads)


@partial(jit, static_argnames=("rows", "room"))
def allocate(params: Decoder, cache: KVCache, *, rows: int, room: int) -> KVCache:
    """The cache of a prompt that has been read to its end, compressed to what its budget gives each head.

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
    budget: Any = policy.budget
    moments = [Moment(next_position, record, rope, heads) for record in records]
    compares_protected = budget.layout.compares_protected
    scores = [policy.rank(*pair, None, raised=not compares_protected) for pair in zip(layers, moments, strict=True)]
    padded = [
        jnp.pad(x, [(0, 0), (0, 0), (0, max(layers.bounds) - x.shape[-1])], constant_values=-jnp.inf) for x in scores
    ]
    means = jnp.stack([layer.capacity[:, 0] for layer in layers])
    least = 0 if policy.every is None else policy.minimum
    counts = budget.allocate(jnp.stack(padded), means, least, heads)
    # The scores that were compared also choose, unless they depend on what has been allocated by now.
    anew = compares_protected or policy.score.needs.by_count or isinstance(policy.protect.recent, float)
    retained = []
    for layer, moment, ranked, mean, count in zip(layers, moments, scores, means, counts, strict=True):
        layer = replace(layer, capacity=count)
        if anew:
            ranked = policy.rank(layer, moment, jnp.minimum(count, layer.slots))
        kept = policy.retain(layer, moment, ranked, layer.slots)
        if policy.every is None:
            kept = replace(kept.without_state(), capacity=jnp.full_like(count, UNLIMITED))
        else:  # a prompt within the budget leaves all heads alike, to be filled while decoding
            within = (next_position <= mean)[:, None] & (count < UNLIMITED)
            kept = replace(kept, capacity=jnp.where(within, mean[:, None], count))
        retained.append(kept)
    own = counts.shape[2]
    lanes = budget.layout.lanes(own * heads.kv_devices()) // heads.kv_devices()
    growing = growing_segments(policy, len(layers), own // lanes)
    return Segments.pack(retained, lanes=lanes, rows=rows, room=room, growing=growing)
