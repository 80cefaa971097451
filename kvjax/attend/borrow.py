"""Attention of one token per row over the entries of another layer, which stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Entries, StepQuery
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer, join_sinks
from kvjax.policy import Policy

from .positions import rotated
from .step import by_place


@dataclass(frozen=True)
class Borrowing:
    """Attention of layers that have no keys and values, for one token per row that has an entry already.

    Attributes:
        policy: that of the entries. Its score observes nothing here: it has seen the queries of the layer that the
            entries belong to.
    """

    policy: Policy

    def __call__(
        self,
        positions: Int[Array, "B"],
        incoming: Bool[Array, "B"],
        *,
        rope: Float[Array, "B C/2"] | None = None,
        heads: Heads = ALL_HEADS,
    ) -> Attend:
        """Computes attention, as a layer of the decoder calls it. The arguments are those of `Stepping`."""
        query_positions = jnp.where(incoming, positions, -1)[:, None]

        def attend(
            layer: AttentionLayer, q: Float[Array, "B Hq 1 D"], k: Any, v: Any, entries: Entries
        ) -> tuple[Float[Array, "B Hq 1 D"], Entries]:
            i, seen = layer.place, None
            q = layer.rope.grown(q, positions[:, None])
            if self.policy.positions == "original":
                q = rotated(layer, q, positions[:, None, None], rope)
            else:
                q, seen = by_place(layer, q, entries.layer(i, 0), rope)
            found = entries.attend(i, StepQuery(q, query_positions, layer.logits, seen=seen))
            return join_sinks(found.context, found.lse, layer.sinks)[0], entries

        return attend
