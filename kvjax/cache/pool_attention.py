"""Attention of one query per row over segments of a pool, and what each piece of a segment received in it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import (
    Asked,
    Reduction,
    SegmentAttention,
    Stored,
    finite_or_zero,
    fold,
    segment_attention,
    visible,
)

from .entries import StepAttention, Take
from .slots import Slots


def attention(
    q: Float[Array, "B Hq 1 D"],
    keys: Stored,
    values: Stored,
    positions: Int[Array, "B 1"],
    pool_positions: Int[Array, "B P T"],
    start: Int[Array, "B H"],
    used: Int[Array, "B H"],
    bias: Float[Array, "B P T"] | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    reduction: Reduction | None,
    asked: Asked | None,
) -> StepAttention:
    """`Entries.attend` over the segments of one layer."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    found = segment_attention(
        q,
        keys,
        values,
        positions,
        pool_positions,
        start,
        used,
        bias=bias,
        logits=reduction is not None,
        asked=asked,
        **options,
    )
    received = None if reduction is None else partial(_received, found, q, positions, reduction=reduction, **options)
    scores = None if asked is None or found.scores is None else partial(_asked_for, found.scores, asked.positions)
    return StepAttention(found.context, found.lse, received, scores)


def _received(
    found: SegmentAttention,
    q: Float[Array, "B Hq 1 D"],
    positions: Int[Array, "B 1"],
    held: Slots,
    take: Take,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    reduction: Reduction,
) -> Float[Array, "B H M"]:
    """The attention that a piece received from the queries: from the logits, or computed again if there are none."""
    if found.logits is None:
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "reduction": reduction}
        return held.received(q=q, lse=found.lse, query_positions=positions, **options)
    logits = jnp.swapaxes(take(jnp.swapaxes(found.logits, 2, 3)), 2, 3)
    lse = found.lse.reshape(*logits.shape[:3], 1)
    weights = jnp.exp(logits - finite_or_zero(lse))
    return fold(jnp.where(visible(positions, held.positions, window), weights, 0.0), reduction.of_group, axis=2)


def _asked_for(
    scores: Float[Array, "B P T"], asked: Int[Array, "B X"], held: Slots, take: Take
) -> Float[Array, "B H M"]:
    """The attention that a piece received from the extra query rows at positions `asked`."""
    asking = jnp.any(asked >= 0, axis=1)[:, None, None]
    return jnp.where((held.positions >= 0) & asking, take(scores), 0.0)
