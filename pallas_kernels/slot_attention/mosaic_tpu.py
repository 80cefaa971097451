"""Slot attention on TPUs (Mosaic): one pass over the tiles up to the last visible slot of each kv head."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold, after_last, check_channels
from ..mosaic_tpu.common import Interpret
from ..mosaic_tpu.decode import attend, serves
from ..quantized import QuantizedArray, plain
from ..visibility import visible
from ..window_scores.mosaic_tpu import window_scores
from ..window_scores.reduction import Reduction
from .asked import Asked
from .reference import SlotAttention

PARTS = 4  # of a tile: 256 kB of keys, where a tile has 1 MB


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H S"] | None = None,
    received: Fold | None = None,
    asked: Asked | None = None,
    interpret: Interpret = False,
) -> SlotAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: as `attend`, and for values with another number of channels than keys.
    """
    check_channels(k, v)
    B, H, S = k_positions.shape
    seen = jnp.any(visible(q_positions, k_positions, window), axis=2)
    scored = seen
    if asked is not None and serves(asked, q.shape[1] // H):
        scored = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        seen |= scored
    used = after_last(seen)
    found = attend(
        q,
        k,
        v,
        q_positions,
        [x.reshape(B * H, 1, S) for x in (k_positions, bias) if x is not None],
        jnp.zeros_like(used),
        used,
        scale=scale,
        window=window,
        softcap=softcap,
        interpret=interpret,
        name="slot_attention",
        parts=PARTS,
        received=received,
        asked=asked,
    )
    score = partial(window_scores, scale=scale, window=window, softcap=softcap, bias=bias, interpret=interpret)
    weights, scores = found.received, found.scores
    if scores is not None:
        scores = jnp.where(scored, scores, 0.0)
    elif asked is not None:
        scores = asked.scores(score, plain(k), k_positions)
    if weights is None and received is not None:
        reduction = Reduction("sum", received, "group")
        weights = score(q, plain(k), q_positions, k_positions, lse=found.lse, reduction=reduction)
    return SlotAttention(found.context, found.lse, weights, scores)
