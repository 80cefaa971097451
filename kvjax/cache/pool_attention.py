"""The attention on each piece of a segment from the query of a step, and from the extra query rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import SegmentAttention, finite_or_zero, fold, visible

from .entries import StepQuery, Take
from .slots import Slots


def received_by(found: SegmentAttention, query: StepQuery, held: Slots, take: Take) -> Float[Array, "B H M"]:
    """Reduces the attention on a piece from the logits of the queries, or computes it again if there are none."""
    reduction, positions = query.reduction, query.positions
    assert reduction is not None
    if found.logits is None:
        given: dict[str, Any] = {"q": query.q, "lse": found.lse, "query_positions": positions, "reduction": reduction}
        return held.received(**given, **query.logits)
    logits = jnp.swapaxes(take(jnp.swapaxes(found.logits, 2, 3)), 2, 3)
    lse = found.lse.reshape(*logits.shape[:3], 1)
    seen = visible(positions, held.positions, query.logits["window"])
    weights = jnp.where(seen, jnp.exp(logits - finite_or_zero(lse)), 0.0)
    return fold(weights, reduction.of_group, axis=2)


def asked_of(scores: Float[Array, "B P T"], asked: Int[Array, "B X"], held: Slots, take: Take) -> Float[Array, "B H M"]:
    """Returns the attention that a piece received from the extra query rows at positions `asked`."""
    asking = jnp.any(asked >= 0, axis=1)[:, None, None]
    return jnp.where((held.positions >= 0) & asking, take(scores), 0.0)
