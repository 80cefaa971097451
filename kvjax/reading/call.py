"""The static facts of calls of layers, and where the rows of their arrays lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kvjax.attend import Borrowing, Reading, Replaying, Stepping, over_heads
from kvjax.mesh.sharding import logical_sharding, rows_sharding
from kvjax.models import Attend


@dataclass(frozen=True)
class Call:
    """The static facts of a call of one layer, or of all layers.

    Attributes:
        attention: of the call.
        mesh: where layers and entries lie; None is one device.
    """

    attention: Reading | Replaying | Stepping | Borrowing
    mesh: Mesh | None

    def of_layers(self, first: int, count: int) -> Call:
        """Returns the call of some layers over their own entries, of a call of all layers."""
        assert isinstance(self.attention, Reading | Stepping)  # the others hold nothing for each layer
        return replace(self, attention=self.attention.of_layers(first, count))

    def attend(self, **rows: Any) -> Attend:
        """Returns the attention function for these arguments, arrays with axes [B, ...] or None."""
        hidden = bool(self.attention.policy.score.needs.hidden)
        return over_heads(self.mesh, self.attention, hidden=hidden, **rows)


def by_row(logits: Float[Array, "B V"], mesh: Mesh | None) -> Float[Array, "B V"]:
    """Returns the logits with whole rows on each device that has a part of the batch, as samplers need them."""
    if mesh is None:
        return logits
    # The logits are gathered after the product: if whole rows are requested of it, XLA gathers the unembedding.
    cut = logical_sharding(mesh, ("batch", "vocab"), logits.shape)
    return in_rows(jax.lax.with_sharding_constraint(logits, cut), mesh)


def in_rows(x: Any, mesh: Mesh | None) -> Any:
    """Puts whole rows of arrays with axes [B, ...] on each device that has a part of the batch."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, rows_sharding(mesh))
