"""The one place where queries meet a cache: attention functions for the decoder, and the choice of kernels behind them.

Each function here returns an `attend` for one call of the decoder. The cache it threads through the layers is the tuple
of LayerCaches; a layer's entry is replaced when that layer has attended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache
from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer, rotate
from kvjax.pallas_kernels import Reduction, compact, prompt_attention, slot_attention, window_scores
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, Received, Storage

Layers = tuple[LayerCache, ...]


def causal(positions: Int[Array, "B N"], block: int = 128) -> Attend:
    """Plain differentiable causal attention over whole sequences without padding, as training needs it. No cache.

    Queries go in blocks, each against only the keys that it may see: on a CPU a third of the time of masking all pairs.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq N D"], Any]:
        rope = layer.rope.row_frequencies(q.shape[-1], jnp.max(positions, axis=1) + 1)
        q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
        B, Hq, N, D = q.shape
        grouped = q.reshape(B, k.shape[1], -1, N, D)
        contexts = []
        for start in range(0, N, block):
            stop = min(start + block, N)
            first = 0 if layer.window is None else max(0, start - layer.window + 1)
            logits = jnp.einsum(
                "BHGND,BHSD->BHGNS",
                grouped[..., start:stop, :],
                k[:, :, first:stop],
                preferred_element_type=jnp.float32,
            )
            distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
            visible = (distance >= 0) & (distance < (layer.window or N))
            weights = jax.nn.softmax(jnp.where(visible, logits * layer.scale, -jnp.inf), axis=-1).astype(v.dtype)
            contexts.append(jnp.einsum("BHGNS,BHSD->BHGND", weights, v[:, :, first:stop]))
        return jnp.concatenate(contexts, axis=3).reshape(B, Hq, N, D), cache

    return attend


def reading(
    policy: Policy,
    positions: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    next_position: Int[Array, "B"],
    *,
    rope: Float[Array, "B R/2"] | None = None,
    slots: Sequence[int],
    kept: Sequence[int | None],
    compress: bool,
    final: bool,
    heads: Heads = ALL_HEADS,
) -> Attend:
    """Attention for many new tokens: over what is cached and, causally, over themselves; then the layer is compressed.

    Args:
        positions: of the new tokens, -1 for padding, which is on the left.
        lengths: new tokens in each row.
        next_position: each row's position after this call.
        rope: frequencies of each row, where they depend on its length.
        slots: how many slots each layer has after this call.
        kept: how many entries a compression leaves at most; None where the layer keeps everything.
        compress: whether to compress to the budget.
        final: whether the prompt ends here, so that a policy that never evicts again can forget its state.
        heads: those that this device holds, if a mesh spreads them; q, k, v and the cache are then its own.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        layers: Layers,
    ) -> tuple[Float[Array, "B Hq N D"], Layers]:
        i = layer.index
        moment = Moment(next_position, layer, rope, heads)
        shape = LayerShape(q.shape[0], heads.whole_groups_of(q.shape[1]), k.shape[1], k.shape[3], k.dtype)
        unrotated = q
        observes = policy.limited(i) and (compress or not final or policy.every is not None)
        old = _with_state(policy, layers[i], shape) if observes else layers[i]
        if policy.positions == "original":
            q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
        entries = old.append(
            LayerCache(
                keys=policy.storage.store(k),
                values=policy.storage.store(v),
                positions=jnp.broadcast_to(positions[:, None], k.shape[:3]),
                capacity=old.capacity,
                per_slot=policy.score.init_slots(shape, k.shape[2]) if observes else None,
            )
        )
        shown = entries.plain()
        keys = shown.keys
        if policy.positions == "in_cache":
            places = _places(entries.positions)
            keys = rotated(layer, keys, places, rope)
            q = rotated(layer, q, jnp.repeat(places[..., -q.shape[2] :], q.shape[1] // k.shape[1], axis=1), rope)
        context, lse = prompt_attention(
            q,
            keys,
            shown.values,
            positions,
            entries.positions,
            scale=layer.scale,
            window=layer.window,
            bias=entries.bias,
        )
        if observes:
            held = replace(shown, keys=keys)
            received = _received(policy.score.received, layer, heads, q, lse, held, positions)
            attended = Attended(q, unrotated, positions, lse, received, lengths, layer.scale, layer.window, heads, i)
            entries = _observe(policy, entries, shown, attended)
        entries = expire(entries, moment, lengths > 0)
        entries = settled(policy, entries, moment, kept=kept[i] if compress else None, slots=slots[i], final=final)
        # Otherwise XLA may put compressing off to the end, and hold the keys and values of all layers until then.
        context, entries = jax.lax.optimization_barrier((context, entries))
        return context, _replace(layers, i, entries)

    return attend


def settled(
    policy: Policy, entries: LayerCache, moment: Moment, *, kept: int | None, slots: int, final: bool
) -> LayerCache:
    """A layer at the end of a call: compressed to `kept` entries at most unless that is None, and of so many slots."""
    if kept is not None:
        entries = policy.compress(entries, moment, min(kept, slots))
    else:
        entries = entries.gather(compact(entries.positions >= 0, min(slots, entries.slots)))
    if final and policy.every is None:
        entries = replace(entries, per_slot=None, per_row=None)
    return entries.grow(slots)


def decoding(
    policy: Policy,
    positions: Int[Array, "B"],
    incoming: Bool[Array, "B"],
    *,
    rope: Float[Array, "B R/2"] | None = None,
    heads: Heads = ALL_HEADS,
) -> Attend:
    """Attention for one new token a row, always in this order: make room, write, attend, observe.

    Args:
        positions: of the new tokens.
        incoming: rows that have one; the others are left as they are.
        rope: frequencies of each row, where they depend on its length.
        heads: those that this device holds, if a mesh spreads them; q, k, v and the cache are then its own.
    """
    query_positions = jnp.where(incoming, positions, -1)[:, None]

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq 1 D"],
        k: Float[Array, "B H 1 D"],
        v: Float[Array, "B H 1 D"],
        layers: Layers,
    ) -> tuple[Float[Array, "B Hq 1 D"], Layers]:
        i = layer.index
        moment = Moment(positions, layer, rope, heads)
        unrotated = q
        observes = not policy.grows(i)
        if policy.positions == "original":
            q, k = (rotated(layer, x, positions[:, None, None], rope) for x in (q, k))
        entries = expire(layers[i], moment, incoming)
        if observes:
            entries = policy.make_room(entries, moment, incoming)
        empty = jnp.where((entries.positions < 0) & incoming[:, None, None], jnp.arange(entries.slots), entries.slots)
        entries = entries.write(
            jnp.min(empty, axis=-1, initial=entries.slots),
            policy.storage.store(k[:, :, 0]),
            policy.storage.store(v[:, :, 0]),
            jnp.broadcast_to(positions[:, None], k.shape[:2]),
        )
        shown = entries.plain()  # an array of its own only if something looks at it
        keys, values = entries.keys, entries.values
        if policy.positions == "in_cache":
            keys, values = rotated(layer, shown.keys, _places(entries.positions), rope), shown.values
            own = jnp.repeat(entries.occupancy - 1, q.shape[1] // k.shape[1], axis=1)
            q = rotated(layer, q, own[..., None], rope)
        wish = policy.score.received if observes else None
        asked = policy.score.asks(entries, query_positions[:, 0]) if observes else None
        together = wish is not None or asked is not None
        found = slot_attention(
            heads.whole_groups(q) if together else q,
            keys,
            values,
            query_positions,
            entries.positions,
            scale=layer.scale,
            window=layer.window,
            bias=entries.bias,
            received=wish.reduction.group if wish else None,
            asked=asked,
        )
        context, lse = (heads.own_queries(x) if together else x for x in (found.context, found.lse))
        if observes:
            lengths = incoming.astype(jnp.int32)
            seen = (q, unrotated, query_positions, lse, found.received, lengths)
            attended = Attended(*seen, layer.scale, layer.window, heads, i, decoding=True, asked=found.scores)
            entries = _observe(policy, entries, shown, attended)
        return context, _replace(layers, i, entries)

    return attend


def replaying(
    show: Callable[[LayerCache, Attended, Array, Array], tuple[Any, Any]],
    storage: Storage,
    positions: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    first: Int[Array, "B"],
    last: Int[Array, "B"],
    *,
    rope: Float[Array, "B R/2"] | None = None,
    heads: Heads = ALL_HEADS,
) -> Attend:
    """Attention for tokens that follow a prompt and leave nothing but what a score has seen of them.

    Args:
        show: (entries, attended, first, last) -> the score's new state; the tokens' own entries are the last ones.
        storage: how keys and values are held, and so seen.
        positions, lengths, rope, heads: as `reading` takes them.
        first, last: handed on.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        layers: Layers,
    ) -> tuple[Float[Array, "B Hq N D"], Layers]:
        i = layer.index
        old, unrotated = layers[i], q
        q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
        state = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], k.shape[2]), x.dtype), old.per_slot)
        at = jnp.broadcast_to(positions[:, None], k.shape[:3])
        own = LayerCache(storage.store(k), storage.store(v), at, old.capacity, state)
        entries = old.append(own).plain()
        context, lse = prompt_attention(
            q,
            entries.keys,
            entries.values,
            positions,
            entries.positions,
            scale=layer.scale,
            window=layer.window,
            bias=entries.bias,
        )
        attended = Attended(q, unrotated, positions, lse, None, lengths, layer.scale, layer.window, heads, i)
        per_slot, per_row = show(entries, attended, first, last)
        per_slot = jax.tree.map(lambda x: x[..., : old.slots], per_slot)
        return context, _replace(layers, i, replace(old, per_slot=per_slot, per_row=per_row))

    return attend


def _received(
    wish: Received | None,
    layer: AttentionLayer,
    heads: Heads,
    q: Float[Array, "B Hq N D"],
    lse: Float[Array, "B Hq N"],
    entries: LayerCache,
    positions: Int[Array, "B N"],
) -> Float[Array, "B H M"] | None:
    """What the entries received from the queries of a call, as a score wishes to see it."""
    if wish is None or wish.stepwise:
        return None
    last = slice(-wish.last if wish.last else None, None)
    q, lse = (heads.whole_groups(x[:, :, last]) for x in (q, lse))
    return received_from(wish.reduction, layer, q, lse, positions[:, last], entries)


def received_from(
    reduction: Reduction,
    layer: AttentionLayer,
    q: Float[Array, "B Hq W D"],
    lse: Float[Array, "B Hq W"],
    positions: Int[Array, "B W"],
    entries: LayerCache,
) -> Float[Array, "B H M"]:
    """What each entry received from queries at these positions, given the log-sum-exp they attended with."""
    return window_scores(
        q,
        entries.keys,
        positions,
        entries.positions,
        lse=lse,
        scale=layer.scale,
        window=layer.window,
        bias=entries.bias,
        reduction=reduction,
    )


def rotated(
    layer: AttentionLayer,
    x: Float[Array, "B H N D"],
    positions: Int[Array, "B #H N"],
    rope: Float[Array, "B R/2"] | None,
) -> Array:
    frequencies = layer.rope.frequencies(x.shape[-1]) if rope is None else rope
    return rotate(x, positions, frequencies, layer.rope.attention_factor)


def _places(positions: Int[Array, "B H M"]) -> Int[Array, "B H M"]:
    """Each token's place among the entries that are there, by position; past the last one for empty slots."""
    last = jnp.iinfo(jnp.int32).max
    return jnp.argsort(jnp.argsort(jnp.where(positions < 0, last, positions), axis=-1), axis=-1)


def expire(entries: LayerCache, moment: Moment, incoming: Bool[Array, "B"]) -> LayerCache:
    """Empties the slots whose token no later query can see, in a layer with a sliding window, of rows that go on."""
    if moment.window is None:
        return entries
    gone = entries.positions <= moment.next_position[:, None, None] - moment.window
    gone &= incoming[:, None, None]
    return replace(entries, positions=jnp.where(gone, -1, entries.positions))


def _with_state(policy: Policy, entries: LayerCache, shape: LayerShape) -> LayerCache:
    """The entries with the score's state, begun anew if it was forgotten when the prompt had been read."""
    if entries.per_slot is not None or entries.per_row is not None:
        return entries
    score = policy.score
    return replace(entries, per_slot=score.init_slots(shape, entries.slots), per_row=score.init_rows(shape))


def _observe(policy: Policy, entries: LayerCache, shown: LayerCache, attended: Attended) -> LayerCache:
    """The entries with new state, of which the score has been shown keys and values as arrays."""
    per_slot, per_row = policy.score.observe(shown, attended)
    return replace(entries, per_slot=per_slot, per_row=per_row)


def _replace(layers: Layers, index: int, layer: LayerCache) -> Layers:
    return (*layers[:index], layer, *layers[index + 1 :])
