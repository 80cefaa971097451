"""Segment attention on TPUs (Mosaic): one pass over the tiles of each head's own segment."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..mosaic_tpu.common import Interpret
from ..mosaic_tpu.decode import attend, serves
from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from .reference import SegmentAttention

PARTS = 8  # of a tile: smaller ones than those of slots, because a segment's first and last parts are fetched in full
MOST_LOGIT_ROWS = 64  # per kv head, whose logits are returned


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
    softcap: float | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    asked: Asked | None = None,
    interpret: Interpret = False,
) -> SegmentAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: as `attend`.
    """
    group = q.shape[1] // start.shape[1]
    asking = jnp.any(q_positions >= 0, axis=1)
    if asked is not None and serves(asked, group):
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
        softcap=softcap,
        interpret=interpret,
        name="segment_attention",
        parts=PARTS,
        logits=logits and group * q.shape[2] <= MOST_LOGIT_ROWS,
        asked=asked,
    )
    return SegmentAttention(found.context, found.lse, found.logits, found.scores)
