"""Attention for several new tokens: over the cached entries and, causally, over themselves; then compression."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import UNLIMITED, Entries, Layers, Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer
from kvjax.pallas_kernels import compact
from kvjax.policy import Attended, LayerShape, Limits, Moment, Needs, Policy, Received

from .positions import expired, met_keys, places, rotated
from .received import attention, received


@dataclass(frozen=True)
class ReadPlan:
    """The static choices of one call that reads several tokens.

    Attributes:
        slots: of each layer after the call.
        kept: the number of entries that the compression of each layer leaves at most; None where the layer is not
            compressed in this call.
        final: whether the prompt ends with this call, so that a policy that never evicts again can forget its state.
        settled: the most entries that each layer retains of a prompt, if its storage settles when this call ends: only
            the newest are then in `slots`. None for a layer whose storage does not settle; empty if none does.
        spares: whether rows without a token are not compressed. `kept` has room for all that they hold.
    """

    slots: tuple[int, ...]
    kept: tuple[int | None, ...]
    final: bool
    settled: tuple[int | None, ...] = ()
    spares: bool = False

    def of_layers(self, first: int, count: int) -> ReadPlan:
        """Returns the plan of some layers."""
        some = slice(first, first + count)
        return replace(self, slots=self.slots[some], kept=self.kept[some], settled=self.settled[some])

    def settles(self, i: int) -> int | None:
        """Returns the most entries that layer i retains of a prompt if its storage settles; None if it does not."""
        return self.settled[i] if self.settled else None


@dataclass(frozen=True)
class Reading:
    """Attention for several new tokens per row; a layer is compressed as soon as it has attended.

    Attributes:
        policy: its score observes the tokens.
        limits: of the layers in the entries.
        plan: the static choices of the call; None leaves each layer as it is after it has attended.
    """

    policy: Policy
    limits: Limits
    plan: ReadPlan | None

    def of_layers(self, first: int, count: int) -> Reading:
        """Returns the same attention for some layers over their own entries."""
        plan = None if self.plan is None else self.plan.of_layers(first, count)
        return replace(self, limits=self.limits.of_layers(first, count), plan=plan)

    def __call__(
        self,
        positions: Int[Array, "B N"],
        lengths: Int[Array, "B"],
        next_position: Int[Array, "B"],
        *,
        rope: Float[Array, "B C/2"] | None = None,
        heads: Heads = ALL_HEADS,
    ) -> Attend:
        """Computes attention, as a layer of the decoder calls it.

        Args:
            positions: of the new tokens, -1 for padding, which is on the left.
            lengths: the number of new tokens in each row.
            next_position: each row's position after this call.
            rope: the frequencies of each row, where they depend on its length.
            heads: those that this device holds, on a mesh; q, k, v and the entries are then its own.
        """
        policy, plan = self.policy, self.plan

        def attend(
            layer: AttentionLayer,
            q: Float[Array, "B Hq N D"],
            k: Float[Array, "B H N D"],
            v: Float[Array, "B H N D"],
            entries: Entries,
        ) -> tuple[Float[Array, "B Hq N D"], Any]:
            i = layer.place
            kept, slots = (None, 0) if plan is None else (plan.kept[i], plan.slots[i])
            moment = Moment(next_position, layer, rope, heads)
            unrotated = q = layer.rope.grown(q, positions)
            forgets = plan is not None and plan.final and kept is None and policy.every is None
            observes = self.limits.limited[i] and not forgets
            old = entries.layer(i, slots)
            if observes and old.slots and layer.window is not None and policy.every is None:
                old = old.in_order()  # steps overwrote slots that left the window, and scores may pool neighbours
            query_heads, hidden_size = heads.whole_groups_of(q.shape[1]), layer.output.shape[-1]
            shape = LayerShape(q.shape[0], query_heads, k.shape[1], k.shape[3], k.dtype, hidden_size)
            if observes and not old.has_state:  # it was forgotten when the prompt had been read
                old = policy.with_state(old, shape, limited=True)
            if policy.positions == "original":
                q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
            at = jnp.broadcast_to(positions[:, None], k.shape[:3])
            new = Slots(*policy.store(k, v, old.values), at, old.capacity)
            if observes:
                new = policy.with_state(new, shape, limited=True)
            held = old.append(new)
            seen = held.plain()  # an array of its own only if something looks at it
            keys = seen.keys
            if policy.positions == "in_cache":
                at = places(held.positions)
                keys = rotated(layer, keys, at, rope)
                q = rotated(layer, q, jnp.repeat(at[..., -q.shape[2] :], q.shape[1] // k.shape[1], axis=1), rope)
            met = replace(seen, keys=keys)
            wishes = policy.score.needs.wishes if observes else ()
            context, lse, found = attention(layer, heads, q, met, positions, "prompts", wishes)
            attended = partial(
                Attended, positions=positions, lse=lse, lengths=lengths, layer=layer, heads=heads, rope=rope
            )
            if held.storing is not None:
                held = replace(held, storing=policy.storage.observe(held, attended(queries=q, received=None)))
            if observes:
                # With the barriers a state has the same bits in every program, whatever else the program computes.
                streams = (layer.hidden, layer.residual) if policy.score.needs.hidden else (None, None)
                *given, streams, sums = jax.lax.optimization_barrier((q, lse, met, streams, tuple(found.values())))
                tokens = replace(layer, hidden=streams[0], residual=streams[1])
                found = dict(zip(found, sums, strict=True))

                @cache
                def shown(wish: Received | None) -> Float[Array, "B H *G M"] | None:
                    nonlocal given
                    queries, sums, entries = given
                    own = partial(attended, hidden=tokens.hidden_as(policy.score.needs.hidden))
                    result = received(wish, "prompts", found, layer, heads, queries, sums, entries, positions, own)
                    given, result = jax.lax.optimization_barrier((given, result))
                    return result

                def show(needs: Needs) -> Attended:
                    queries = unrotated if needs.queries == "unrotated" else q
                    return attended(
                        queries=queries,
                        received=shown(needs.received),
                        hidden=tokens.hidden_as(needs.hidden),
                        show=show,
                    )

                state = policy.score.observe(seen, show(policy.score.needs))
                per_slot, per_row = jax.lax.optimization_barrier(state)
                held = replace(held, per_slot=per_slot, per_row=per_row)
            if plan is not None:
                met_by = None if kept is None else met_keys(policy, held, moment)
                if old.slots and kept is None and plan.settles(i) is None and layer.window is None:  # no entry leaves
                    # Attention and the score have read the slots behind the barrier, so that they change in place.
                    joined = replace(held, keys=None, values=None)
                    context, old, new, joined = jax.lax.optimization_barrier((context, old, new, joined))
                    held = old.grow(slots).insert(new, joined)
                    held = held.without_state() if forgets else held
                else:
                    held, capacity = expired(held, moment, lengths > 0), held.capacity
                    if plan.spares:  # without a limit a row retains all that it holds
                        held = replace(held, capacity=jnp.where(lengths[:, None] > 0, capacity, UNLIMITED))
                    held = finished(policy, held, moment, met_by, plan, i)
                    if plan.spares:
                        held = replace(held, capacity=jnp.where(lengths[:, None] > 0, held.capacity, capacity))
            # Without the barrier XLA may compress all layers at the end, and hold their keys and values until then.
            context, held = jax.lax.optimization_barrier((context, held))
            after = entries.with_layer(i, held)
            return context, (after, Layers((seen.without_state(),))) if layer.lends else after

        return attend


def finished(
    policy: Policy, entries: Slots, moment: Moment, met: Float[Array, "B H M D"] | None, plan: ReadPlan, i: int
) -> Slots:
    """Returns layer i at the end of a call: compressed if it is by the plan, and in the slots that it then has.

    Args:
        met: as `Policy.compress` takes it.
    """
    kept, slots, settled = plan.kept[i], plan.slots[i], plan.settles(i)
    most = slots if settled is None else settled
    if kept is not None:
        entries = policy.compress(entries, moment, min(kept, most), met)
    else:
        entries = entries.gather(compact(entries.positions >= 0, min(most, entries.slots)))
    if settled is not None:
        entries = policy.storage.settle(entries.grow(settled), **moment.layer.logits)
    if plan.final and policy.every is None:
        entries = entries.without_state()
    return entries.grow(slots)
