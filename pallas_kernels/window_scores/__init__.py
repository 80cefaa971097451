"""The attention that each key received from a window of queries: the score of most policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import by_member
from ..dispatch import dispatch, mapped
from . import reference
from .reduction import DEFAULT_REDUCTION, Reduction

_scores = dispatch(reference.window_scores, "triton", "mosaic_tpu", "xla")

__all__ = ["Reduction", "window_scores"]


def window_scores(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    lse: Float[Array, "B Hq W"] | None = None,
    reduction: Reduction = DEFAULT_REDUCTION,
    **options: Any,
) -> Float[Array, "B H *G M"]:
    """Computes what the reference defines; with group="none", one query head of a group after another, [B, H, G, M]."""
    if reduction.group != "none":
        return _scores(q, k, q_positions, k_positions, lse=lse, reduction=reduction, **options)
    H = k_positions.shape[1]

    def of_head(head: tuple[Array, Array | None]) -> Float[Array, "B H M"]:
        q, lse = head
        alone = replace(reduction, group="sum")
        return _scores(q, k, q_positions, k_positions, lse=lse, reduction=alone, **options)

    heads = by_member(q, H), None if lse is None else by_member(lse, H)
    return jnp.moveaxis(mapped(of_head, heads), 0, 2)
