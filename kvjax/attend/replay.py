"""Attention for tokens that follow a prompt: they leave what a score has observed, or their entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Entries, Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer
from kvjax.policy import Attended, Policy

from .positions import rotated
from .received import attention, received


@dataclass(frozen=True)
class Replaying:
    """Attention for the tokens of a `kvjax.policy.Pass`, over a prompt's whole cache and causally over themselves.

    Attributes:
        policy: its score observes the pass.
        instead: attends without a score, as `kvjax.policy.Replay` describes it; None attends and observes.
        leaves: whether it attends without a score, and returns the tokens' own entries in place of the prompt's.
    """

    policy: Policy
    instead: Callable[..., Array] | None = None
    leaves: bool = False

    def __call__(
        self,
        positions: Int[Array, "B W"],
        lengths: Int[Array, "B"],
        first: Int[Array, "B"],
        last: Int[Array, "B"],
        measured: Float[Array, "B W"] | None = None,
        *,
        rope: Float[Array, "B C/2"] | None = None,
        heads: Heads = ALL_HEADS,
    ) -> Attend:
        """Computes attention, as a layer of the decoder calls it.

        Args:
            positions, lengths, rope, heads: as `Reading` takes them.
            first, last: of the pass.
            measured: of each token, in the layer that is called; see `Attended`.
        """
        policy = self.policy

        def attend(
            layer: AttentionLayer,
            q: Float[Array, "B Hq W D"],
            k: Float[Array, "B H W D"],
            v: Float[Array, "B H W D"],
            entries: Entries,
        ) -> tuple[Float[Array, "B Hq W D"], Entries]:
            i, needs = layer.place, policy.score.needs
            q = layer.rope.grown(q, positions)
            old, unrotated = entries.layer(i, 0), q
            q, k = (rotated(layer, x, positions[:, None], rope) for x in (q, k))
            own = following(policy, old, k, v, positions)
            held = old.append(own).plain()
            if self.instead is not None:
                return self.instead(layer, q, k, v, positions, held), entries
            wishes = () if self.leaves else needs.wishes
            context, lse, found = attention(layer, heads, q, held, positions, "replays", wishes)
            if self.leaves:
                return context, entries.with_layer(i, own)
            attended = partial(
                Attended,
                positions=positions,
                lse=lse,
                lengths=lengths,
                layer=layer,
                heads=heads,
                replay=(first, last),
                hidden=layer.hidden_as(needs.hidden),
                measured=measured,
                rope=rope,
            )
            shown = received(needs.received, "replays", found, layer, heads, q, lse, held, positions, attended)
            queries = unrotated if needs.queries == "unrotated" else q
            per_slot, per_row = policy.score.observe(held, attended(queries=queries, received=shown))
            per_slot = jax.tree.map(lambda x: x[..., : old.slots], per_slot)
            return context, entries.with_layer(i, replace(old, per_slot=per_slot, per_row=per_row))

        return attend


def following(
    policy: Policy,
    old: Slots,
    k: Float[Array, "B H W D"],
    v: Float[Array, "B H W D"],
    positions: Int[Array, "B W"],
) -> Slots:
    """Returns the entries of a pass behind a layer's: `k` after RoPE and `v`, both as the storage rounds them."""
    state = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], k.shape[2]), x.dtype), old.per_slot)
    at = jnp.broadcast_to(positions[:, None], k.shape[:3])
    return Slots(*policy.store(k, v, old.values), at, old.capacity, state)
