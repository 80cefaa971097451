"""Attention for one new token per row, always in this order: make room, write, attend, observe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Entries, Slots, StepQuery, Take
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer, join_sinks
from kvjax.policy import Attended, Limits, Moment, Policy

from .positions import expired, places, rotated


@dataclass(frozen=True)
class RoomMaker:
    """A policy's decisions while a layer makes room for one token per row: a `kvjax.cache.MakeRoom`.

    Attributes:
        incoming: the rows with a token.
        count: the number of entries that a full head evicts; 0 in a layer that grows.
    """

    policy: Policy
    moment: Moment
    incoming: Bool[Array, "B"]
    count: int

    @classmethod
    def of(cls, policy: Policy, moment: Moment, incoming: Bool[Array, "B"], limits: Limits) -> RoomMaker:
        """Returns the decisions for the layer of a moment, one of those with these limits."""
        evicts = limits.evicts[moment.layer.place]
        return cls(policy, moment, incoming, (policy.every or 0) if evicts else 0)

    @property
    def window(self) -> int | None:
        return self.moment.window

    @property
    def piecewise(self) -> bool:
        return self.policy.piecewise

    @property
    def absorbs(self) -> bool:
        return self.policy.merge.effects.at_steps

    def renew(self, entries: Slots) -> Slots:
        seen = self.moment.next_position + self.incoming  # a budget bounds what a query sees, itself included
        return expired(self.policy.renewed(entries, seen), self.moment, self.incoming)

    def judge(self, entries: Slots) -> Float[Array, "B H M"]:
        return self.policy.expendable(entries, self.moment)

    def victims(self, scores: Float[Array, "B H M"], positions: Int[Array, "B H M"]) -> Int[Array, "B H count"]:
        return self.policy.select.victims(scores, positions, self.count)

    def release(self, entries: Slots, lost: Bool[Array, "B H S"]) -> Slots:
        return self.policy.release(entries, self.moment, lost, self.count)


@dataclass(frozen=True)
class Stepping:
    """Attention for one new token per row.

    Attributes:
        policy: makes room for the token.
        limits: of the layers in the entries.
    """

    policy: Policy
    limits: Limits

    def of_layers(self, first: int, count: int) -> Stepping:
        """Returns the same attention for some layers over their own entries."""
        return replace(self, limits=self.limits.of_layers(first, count))

    def __call__(
        self,
        positions: Int[Array, "B"],
        incoming: Bool[Array, "B"],
        *,
        rope: Float[Array, "B C/2"] | None = None,
        heads: Heads = ALL_HEADS,
    ) -> Attend:
        """Computes attention, as a layer of the decoder calls it.

        Args:
            positions: of the new tokens.
            incoming: the rows that have one. The others stay as they are.
            rope: the frequencies of each row, where they depend on its length.
            heads: those that this device holds, on a mesh; q, k, v and the entries are then its own.
        """
        policy = self.policy
        query_positions = jnp.where(incoming, positions, -1)[:, None]

        def attend(
            layer: AttentionLayer,
            q: Float[Array, "B Hq 1 D"],
            k: Float[Array, "B H 1 D"],
            v: Float[Array, "B H 1 D"],
            entries: Entries,
        ) -> tuple[Float[Array, "B Hq 1 D"], Entries]:
            i, score = layer.place, policy.score
            room = RoomMaker.of(policy, Moment(positions, layer, rope, heads), incoming, self.limits)
            q = layer.rope.grown(q, positions[:, None])
            unrotated, seen = q, None
            if policy.positions == "original":
                q, k = (rotated(layer, x, positions[:, None, None], rope) for x in (q, k))
            entries, slot = entries.make_room(i, incoming, room)
            at = jnp.broadcast_to(positions[:, None], k.shape[:2])
            token = policy.store(k[:, :, 0], v[:, :, 0], entries.stored[1])
            entries = entries.write(i, slot, *token, at)
            if policy.positions == "in_cache":
                q, seen = by_place(layer, q, entries.layer(i, 0), rope)
            wish = score.needs.received if room.count else None
            wish = wish if wish is not None and wish.shown("steps") else None
            asked = score.asks(entries.layer(i, 0).per_row, query_positions[:, 0]) if room.count else None
            groups = wish is not None or asked is not None  # the score looks at all query heads of a kv head
            queries, sinks = q, layer.sinks
            if groups:
                queries = heads.whole_groups(q)
                sinks = None if sinks is None else heads.whole_groups(sinks[None])[0]
            # A kernel's weights are of a softmax without sinks, and already reduced over the group. With sinks they are
            # computed from the log-sum-exp that sinks have joined, in one more pass over the keys.
            again = sinks is not None and wish is not None
            reduction = None if wish is None or again else wish.reduction
            found = entries.attend(i, StepQuery(queries, query_positions, layer.logits, reduction, asked, seen))
            joined = join_sinks(found.context, found.lse, sinks)
            context, lse = (heads.own_queries(x) if groups else x for x in joined)
            if not room.count:
                return context, entries

            def received(held: Slots, take: Take) -> Float[Array, "B H M"] | None:
                if wish is None or not again:
                    return None if found.received is None else found.received(held, take)
                met = held if seen is None else replace(held, keys=seen.keys)
                return met.received(
                    q=queries, lse=joined[1], query_positions=query_positions, **layer.logits, reduction=wish.reduction
                )

            def show(held: Slots, take: Take) -> tuple[Array, Array]:
                attended = partial(
                    Attended,
                    positions=query_positions,
                    lse=lse,
                    lengths=incoming.astype(jnp.int32),
                    layer=layer,
                    heads=heads,
                    decoding=True,
                    asked=None if found.asked is None else found.asked(held, take),
                    hidden=layer.hidden_as(score.needs.hidden),
                    rope=rope,
                )
                given = received(held, take)
                if given is not None and wish is not None and wish.weigh is not None:  # of the only query of each row
                    given = jax.vmap(jnp.multiply)(given, wish.weigh(attended(queries=q, received=None))[:, 0])
                own = unrotated if score.needs.queries == "unrotated" else q
                return score.observe(held, attended(queries=own, received=given))

            return context, entries.observe(i, show, room)

        return attend


def by_place(
    layer: AttentionLayer, q: Float[Array, "B Hq 1 D"], entries: Slots, rope: Float[Array, "B C/2"] | None
) -> tuple[Float[Array, "B Hq 1 D"], Slots]:
    """Returns the query and the keys rotated to their places in the cache, the newest entry being the query's own."""
    entries = entries.plain()
    keys = rotated(layer, entries.keys, places(entries.positions), rope)
    own = jnp.repeat(entries.occupancy - 1, q.shape[1] // keys.shape[1], axis=1)
    return rotated(layer, q, own[..., None], rope), replace(entries, keys=keys)
