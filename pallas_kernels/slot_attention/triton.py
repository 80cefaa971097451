"""Decode attention on GPUs, by Triton: one pass over keys and values, to the last occupied slot and no further."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..quantized import QuantizedArray, plain
from ..tiling import Fold, after_last, fold, pad
from ..triton_attention import AskedRows, Joins, attend, blocks_for, check, power_of_two
from ..visibility import visible
from ..window_scores import Reduction, window_scores
from .reference import Asked, SlotAttention

LOGITS = 64  # rows a kv head for which they are kept to say what slots received; others are computed again
ASKED = 64  # rows of a product that are asked besides
ASKED_BYTES = 48 << 10  # of all of a kv head, at most: more do not leave room for keys and get a pass of their own


def slot_attention(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H S D"] | QuantizedArray,
    v: Float[Array, "B H S D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B H S"] | None = None,
    received: Fold | None = None,
    asked: Asked | None = None,
    interpret: bool = False,
) -> SlotAttention:
    """As the reference.

    Raises:
        NotImplementedError: for mixed or other dtypes than float32, bfloat16 and float16, for more than 256 channels a
            head, and in 8 or 4 bits for numbers of channels that are no power of two.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias}
    bound = after_last(k_positions >= 0)
    keeps = received is not None and Hq // H * W <= LOGITS
    rows = q.reshape(B, H, -1, D)
    fits = asked is not None and rows.shape[2] <= blocks_for(rows.shape[2], k, asked=1).rows
    besides = tiles(asked, H) if fits and asked is not None else None
    ask: dict[str, Any] = {} if besides is None else {"asked": besides[0], "joins": besides[1]}
    found = attend(rows, k, v, q_positions, k_positions, bound, logits=keeps, interpret=interpret, **ask, **options)
    assert found.out is not None
    lse = found.lse.reshape(B, Hq, W)
    weights = scores = None
    if found.logits is not None and received is not None:
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(B, H, -1, W, 1)
        weights = jnp.exp(found.logits.reshape(B, H, -1, W, S) - finite)
        # What was not looked at is undefined, and not visible either.
        weights = jnp.where(visible(q_positions, k_positions, window)[:, :, None], weights, 0.0)
        weights = fold(weights, received, axis=2).sum(axis=2)
    elif received is not None:
        reduction = Reduction(rows="sum", group=received, first="group")
        weights = window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    if found.scores is not None and asked is not None:
        looked_at = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        scores = jnp.where(looked_at, found.scores, 0.0)
        if asked.reduction.group == "mean":
            scores = scores / (Hq // H)
    elif asked is not None:
        scores = asked.scores(window_scores, plain(k), k_positions, **options)
    return SlotAttention(found.out.reshape(q.shape), lse, weights, scores)


def tiles(asked: Asked, heads: int) -> tuple[AskedRows, Joins] | None:
    """The rows of each kv head and how they are joined; None if that takes more than one pass can give."""
    B, Hq, E, D = asked.queries.shape
    G, how = Hq // heads, asked.reduction
    over_rows, over_group = ("max" if kind == "max" else "sum" for kind in (how.rows, how.group))
    lse = jnp.where((asked.positions < 0)[:, None] | jnp.isneginf(asked.lse), jnp.inf, asked.lse)
    q, lse, t = asked.queries.reshape(B, heads, G, E, D), lse.reshape(B, heads, G, E), asked.positions[:, None]
    if over_rows == over_group:  # then all G E rows are alike
        q, lse, t = q.reshape(B, heads, 1, -1, D), lse.reshape(B, heads, 1, -1), jnp.tile(t, (1, 1, G))
        size = min(power_of_two(G * E), ASKED)
    elif how.first == "rows":
        return None
    else:
        t, size = jnp.repeat(t, G, axis=1), power_of_two(E)
    spare = -lse.shape[3] % size
    q, lse, t = pad(q, spare, 3), pad(lse, spare, 3, jnp.inf), pad(t, spare, 2, -1)
    q, lse, t = q.reshape(B, heads, -1, D), lse.reshape(B, heads, -1), t.reshape(B, -1)
    if how.rows == "mean" or size > ASKED or t.shape[1] * power_of_two(D) * q.dtype.itemsize > ASKED_BYTES:
        return None
    return AskedRows(q, lse, t), Joins(size, over_group, over_rows)
