"""Slot attention on GPUs (Triton): one pass over keys and values, which ends at the last occupied slot."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold, fold, pad
from ..quantized import QuantizedArray, plain
from ..softmax import finite_or_zero
from ..triton.attention import attend, attend_blocks
from ..triton.attention_kernel import ExtraReduction, ExtraRows
from ..triton.blocks import power_of_two
from ..triton.common import check
from ..visibility import visible
from ..window_scores import Reduction, window_scores
from .asked import Asked
from .reference import SlotAttention

MOST_LOGIT_ROWS = 64  # query rows per kv head for which logits are stored; with more, `window_scores` recomputes them
MOST_EXTRA_TILE_ROWS = 64  # extra rows per product
MOST_EXTRA_BYTES = 48 << 10  # of the extra rows of a kv head; more leave no room for keys and get a pass of their own


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S Dv"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H S"] | None = None,
    received: Fold | None = None,
    asked: Asked | None = None,
    interpret: bool = False,
) -> SlotAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for codes
            whose D is not a power of two; for a GPU that is not NVIDIA's or older than the A100.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    stores_logits = received is not None and Hq // H * W <= MOST_LOGIT_ROWS
    rows = q.reshape(B, H, -1, D)
    extra = extra_options(asked, rows, k, H)
    results = attend(
        rows, k, v, q_positions, k_positions, logits=stores_logits, interpret=interpret, **extra, **options
    )
    assert results.out is not None
    lse = results.lse.reshape(B, Hq, W)
    weights = scores = None
    if results.logits is not None and received is not None:
        finite = finite_or_zero(lse).reshape(B, H, -1, W, 1)
        weights = jnp.exp(results.logits.reshape(B, H, -1, W, S) - finite)
        # Logits of slots that were not read are undefined; no query sees these slots.
        weights = jnp.where(visible(q_positions, k_positions, window)[:, :, None], weights, 0.0)
        weights = fold(weights, received, axis=2).sum(axis=2)
    elif received is not None:
        reduction = Reduction(rows="sum", group=received, first="group")
        weights = window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    if results.scores is not None and asked is not None:
        scored = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        scores = jnp.where(scored, results.scores, 0.0)
        if asked.reduction.group == "mean":
            scores = scores / (Hq // H)
    elif asked is not None:
        scores = asked.scores(window_scores, plain(k), k_positions, **options)
    return SlotAttention(results.out.reshape(B, Hq, W, -1), lse, weights, scores)


def extra_options(
    asked: Asked | None, rows: Float[Array, "B H R D"], k: Array | QuantizedArray, heads: int
) -> dict[str, Any]:
    """The arguments of `attend` for extra query rows; none if there are no rows that one pass can score."""
    if asked is None or rows.shape[2] > attend_blocks(rows.shape[2], k, extra=1).rows:
        return {}
    extra = extra_rows(asked, heads)
    return {} if extra is None else {"extra": extra[0], "extra_reduction": extra[1]}


def extra_rows(asked: Asked, heads: int) -> tuple[ExtraRows, ExtraReduction] | None:
    """Arranges the extra rows of each kv head in tiles, so that a reduction over tiles and rows is `asked.reduction`.

    Returns None if one pass cannot compute that reduction, or if the rows take too much memory.
    """
    B, Hq, X, D = asked.queries.shape
    G, reduction = Hq // heads, asked.reduction
    over_rows, over_group = ("max" if kind == "max" else "sum" for kind in (reduction.rows, reduction.group))
    lse = jnp.where((asked.positions < 0)[:, None] | jnp.isneginf(asked.lse), jnp.inf, asked.lse)
    q, lse, t = asked.queries.reshape(B, heads, G, X, D), lse.reshape(B, heads, G, X), asked.positions[:, None]
    if over_rows == over_group:  # the order of all G X rows does not matter
        q, lse, t = q.reshape(B, heads, 1, -1, D), lse.reshape(B, heads, 1, -1), jnp.tile(t, (1, 1, G))
        size = min(power_of_two(G * X), MOST_EXTRA_TILE_ROWS)
    elif reduction.first == "rows":
        return None
    else:  # a tile holds the rows of one query head
        t, size = jnp.repeat(t, G, axis=1), power_of_two(X)
    padding = -lse.shape[3] % size
    q, lse, t = pad(q, padding, 3), pad(lse, padding, 3, jnp.inf), pad(t, padding, 2, -1)
    q, lse, t = q.reshape(B, heads, -1, D), lse.reshape(B, heads, -1), t.reshape(B, -1)
    nbytes = t.shape[1] * power_of_two(D) * q.dtype.itemsize
    if reduction.rows == "mean" or size > MOST_EXTRA_TILE_ROWS or nbytes > MOST_EXTRA_BYTES:
        return None
    return ExtraRows(q, lse, t), ExtraReduction(size, over_group, over_rows)
