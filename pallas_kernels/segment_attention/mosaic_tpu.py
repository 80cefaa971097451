"""Segment attention on TPUs (Mosaic): one pass over the tiles of each head's own segment."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..mosaic import Interpret
from ..mosaic_decode import attend
from ..quantized import QuantizedArray
from ..slot_attention.reference import Asked
from .reference import SegmentAttention

# Of a tile. The first and last part of a segment are fetched in full, so they are smaller than those of slots.
PARTS = 8


def segment_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    start: Int[Array, "B H"],
    used: Int[Array, "B H"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    asked: Asked | None = None,
    interpret: Interpret = False,
) -> SegmentAttention:
    """Computes what the reference defines, except for the logits, which are None.

    Raises:
        NotImplementedError: as `attend`.
    """
    asking = jnp.any(q_positions >= 0, axis=1)
    if asked is not None:
        asking |= jnp.any(asked.positions >= 0, axis=1)
    found = attend(
        q,
        k,
        v,
        q_positions,
        [x for x in (k_positions, bias) if x is not None],
        start,
        jnp.where(asking[:, None], used, 0),
        scale=scale,
        window=window,
        interpret=interpret,
        name="segment_attention",
        parts=PARTS,
        asked=asked,
    )
    return SegmentAttention(found.context, found.lse, None, found.scores)
