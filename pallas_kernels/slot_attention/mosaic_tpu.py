"""Slot attention on TPUs (Mosaic): one pass over the tiles up to the last visible slot of each kv head.

The G W query rows of a kv head are one tile, so keys and values are read once. Steps of the grid after a head's last
visible tile fetch nothing and compute nothing. The grid ends with the last visible tile of the fullest head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div
from jaxtyping import Array, Float, Int

from ..arrays import Fold, after_last, pad
from ..mosaic import (
    LANES,
    MOST_QUERY_ROWS,
    MOST_TILE_LOGITS,
    SUBLANES,
    VMEM_BYTES,
    Interpret,
    SoftmaxScratch,
    check,
    compiler_params,
    in_place,
    round_up,
    stored_transposed,
    tile_size,
    visible_in_tile,
)
from ..mosaic_codes import (
    QueryRows,
    check_alike,
    clear_outside,
    entry_nbytes,
    merge_heads,
    read,
    tile_logits,
    weighted_values,
)
from ..quantized import QuantizedArray, plain
from ..visibility import visible
from ..window_scores.mosaic_tpu import window_scores
from ..window_scores.reference import Reduction
from .reference import Asked, SlotAttention

TILE_BYTES = 256 << 10  # a tile of keys; a tile of values has the same size
MOST_EXTRA_ROWS = 512  # extra query rows per kv head; more take a pass of their own


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
    interpret: Interpret = False,
) -> SlotAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32 or bfloat16; for more than MOST_QUERY_ROWS rows
            per kv head, which would not fit the chip's memory beside a tile of keys; for keys and values that are not
            quantised alike.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    G = Hq // H
    check_alike(k, v)
    rows = QueryRows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > MOST_QUERY_ROWS:
        raise NotImplementedError(f"{stacked} query rows per kv head: expected at most {MOST_QUERY_ROWS}")
    fits = asked is not None and G * asked.positions.shape[1] <= MOST_EXTRA_ROWS and asked.reduction.rows != "mean"
    extra = _extra_rows(asked, k, H) if fits and asked is not None else ()
    size = tile_size(S, slots_per_tile(entry_nbytes(k), stacked + (extra[0].shape[-2] if extra else 0)))
    transposed = stored_transposed(D) and not isinstance(k, QuantizedArray)
    entries = [jax.tree.map(partial(in_place, interpret=interpret), merge_heads(x, transposed)) for x in (k, v)]
    per_slot = [x.reshape(B * H, 1, S) for x in (k_positions, bias) if x is not None]
    seen = jnp.any(visible(q_positions, k_positions, window), axis=2)
    if extra and asked is not None:
        scored = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        seen |= scored
    used = after_last(seen).reshape(-1)
    tiles = ((used + size - 1) // size).astype(jnp.int32)

    def tile(n: Array, j: Array, tiles: Any) -> Array:
        """The tile of step j. After the last visible tile it is that tile again, so that nothing is fetched."""
        return jnp.minimum(j, jnp.maximum(tiles[n] - 1, 0))

    def per_head(*shape: int) -> pl.BlockSpec:
        """All of one head's part of an array [B*H, ...]."""
        return pl.BlockSpec((None, *shape), lambda n, j, tiles: (n, *(0,) * len(shape)))

    def per_row(rows: int) -> pl.BlockSpec:
        """One batch row's column of an array [B, rows, 1]."""
        return pl.BlockSpec((None, rows, 1), lambda n, j, tiles: (div(n, H), 0, 0))

    def slots_last(lines: int) -> pl.BlockSpec:
        """A tile of an array [B*H, lines, S]."""
        return pl.BlockSpec((None, lines, size), lambda n, j, tiles: (n, 0, tile(n, j, tiles)))

    def entry_specs(x: Any) -> Any:
        """Tiles of keys or values. Scales have slots last, and so have transposed arrays."""
        if isinstance(x, QuantizedArray):
            specs: Any = {"codes": entry_specs(x.codes), "scales": slots_last(x.scales.shape[1])}
            return replace(x, **specs)
        if transposed:
            return slots_last(x.shape[1])
        return pl.BlockSpec((None, size, x.shape[2]), lambda n, j, tiles: (n, tile(n, j, tiles), 0))

    out_specs = [per_head(*rows.shape), per_head(R, 1)]
    out_shape = [jax.ShapeDtypeStruct((B * H, *rows.shape), q.dtype), jax.ShapeDtypeStruct((B * H, R, 1), jnp.float32)]
    scratch = SoftmaxScratch.scratch(rows.shape)
    if extra:
        out_specs.append(slots_last(1))
        out_shape.append(jax.ShapeDtypeStruct((B * H, 1, S), jnp.float32))
    # What slots received needs the log-sum-exp of all tiles, so all logits stay on the chip until the last tile.
    padded = round_up(S, size)
    stores_logits = received is not None and 4 * padded * (round_up(R, SUBLANES) + 2 * SUBLANES) <= VMEM_BYTES // 2
    if stores_logits:
        out_specs.append(per_head(1, padded))
        out_shape.append(jax.ShapeDtypeStruct((B * H, 1, padded), jnp.float32))
        scratch.append(pltpu.VMEM((G * W, padded), jnp.float32))
    body = partial(
        _kernel,
        size=size,
        slots=S,
        scale=scale,
        window=window,
        transposed=transposed,
        biased=bias is not None,
        extra_reduction=asked.reduction if extra and asked is not None else None,
        fold=received if stores_logits else None,
        group=G,
        extra_count=G * asked.positions.shape[1] if asked is not None else 0,
    )
    context, sums, *more = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * H, jnp.maximum(jnp.max(tiles), 1)),
            in_specs=[
                per_head(*rows.queries.shape[1:]),
                per_row(R),
                *map(entry_specs, entries),
                *[slots_last(1)] * len(per_slot),
                *[per_head(*x.shape[1:]) for x in extra[:2]],
                *[per_row(x.shape[1]) for x in extra[2:]],
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=compiler_params("parallel", "arbitrary"),
        interpret=interpret,
        name="slot_attention",
    )(tiles, rows.queries, rows.positions, *entries, *per_slot, *extra)
    context, lse = rows.unpad(context).reshape(q.shape), rows.unpad(sums).reshape(B, Hq, W)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "interpret": interpret}
    weights = scores = None
    if extra:
        scores = jnp.where(scored, more.pop(0).reshape(B, H, S), 0.0)  # undefined for tiles that were not fetched
    elif asked is not None:
        scores = asked.scores(window_scores, plain(k), k_positions, **options)
    if stores_logits:
        weights = more.pop()[..., :S].reshape(B, H, S)
    elif received is not None:
        reduction = Reduction("sum", received, "group")
        weights = window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    return SlotAttention(context, lse, weights, scores)


def _extra_rows(asked: Asked, k: Array | QuantizedArray, heads: int) -> tuple[Array, Array, Array]:
    """The extra queries of each kv head, their log-sum-exps as a column (+inf for padding), and their positions."""
    rows = QueryRows.of(asked.queries, asked.positions, k, heads)
    lse = jnp.where((asked.positions < 0)[:, None] | jnp.isneginf(asked.lse), jnp.inf, asked.lse)
    lse = pad(lse.reshape(len(rows.queries), rows.given, 1), rows.height - rows.given, axis=1, value=jnp.inf)
    return rows.queries, lse, rows.positions


def slots_per_tile(nbytes: int, rows: int) -> int:
    """Slots per tile, so that a fetch takes longer than the start of a step and the logits stay small.

    Args:
        nbytes: bytes of the keys of one slot.
        rows: query rows of a kv head.
    """
    most = min(TILE_BYTES // nbytes, MOST_TILE_LOGITS // rows)
    return max(most // LANES, 1) * LANES


def _kernel(
    tiles: Any,
    q: Any,
    t: Any,
    k: Any,
    v: Any,
    p: Any,
    *refs: Any,
    size: int,
    slots: int,
    scale: float,
    window: int | None,
    transposed: bool,
    biased: bool,
    extra_reduction: Reduction | None,
    fold: Fold | None,
    group: int,
    extra_count: int,
) -> None:
    """Adds tile j of head n to its softmax; writes the scores of the tile, and at the last step the head's results.

    Args:
        size: slots per tile.
        slots: S.
        extra_reduction: of the weights of the extra rows, if there are any.
        fold: over the group, of the weights that slots received, if they are requested.
        extra_count: the number of extra rows of a kv head without padding.
    """
    left = iter(refs)
    bias = next(left) if biased else None
    extra = [next(left) for _ in range(3)] if extra_reduction else []
    out, lse = next(left), next(left)
    scores = next(left) if extra_reduction else None
    received = next(left) if fold else None
    softmax = SoftmaxScratch(*(next(left) for _ in range(3)))
    stored_logits = next(left) if fold else None
    n, j = pl.program_id(0), pl.program_id(1)

    def place(j: Array) -> Any:
        return slice(None) if slots <= size else pl.ds(pl.multiple_of(j * size, size), size)

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()

    @pl.when(j < tiles[n])
    def _() -> None:
        keys, values, exists = jax.tree.map(read, k), jax.tree.map(read, v), None
        if slots % size:  # beyond the last slot a tile is undefined and may be NaN
            exists = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < slots - j * size
            values = clear_outside(values, transposed, 0, slots - j * size)

        def logits_from(queries: Any, t: Any) -> Array:
            logits = tile_logits(queries[...], keys, transposed) * scale
            if bias is not None:
                logits += bias[...]
            return jnp.where(visible_in_tile(t[...], p[...], window, exists), logits, -jnp.inf)

        logits = logits_from(q, t)
        softmax.add(logits, partial(weighted_values, values, transposed))
        if stored_logits is not None:
            stored_logits[:, place(j)] = logits[: stored_logits.shape[0]]
        if extra_reduction is not None and scores is not None:
            queries, sums, at = extra
            weights = jnp.exp(logits_from(queries, at) - sums[...])
            scores[...] = _reduced(weights[:extra_count], extra_reduction, group)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...], lse[...] = context.astype(out.dtype), sums
        if received is not None and stored_logits is not None and fold is not None:
            reduction = Reduction("sum", fold, "group")
            received[...] = jnp.zeros(received.shape, jnp.float32)
            finite = jnp.where(sums == -jnp.inf, 0.0, sums)[: stored_logits.shape[0]]

            def receive(j: Array, _: None) -> None:
                weights = jnp.exp(stored_logits[:, place(j)] - finite)
                received[:, place(j)] = _reduced(weights, reduction, group)

            jax.lax.fori_loop(0, tiles[n], receive, None)


def _reduced(weights: Float[Array, "G*W K"], reduction: Reduction, group: int) -> Float[Array, "1 K"]:
    """Reduces weights over the group and the queries. A mean over queries is not supported."""
    over_rows, over_group = (jnp.max if x == "max" else jnp.sum for x in (reduction.rows, reduction.group))
    if over_rows is over_group or group == 1:
        total = over_rows(weights, axis=0, keepdims=True)
    elif weights.shape[0] == group:
        total = over_group(weights, axis=0, keepdims=True)
    else:
        each = weights.reshape(group, -1, weights.shape[1])
        if reduction.first == "group":
            total = over_rows(over_group(each, axis=0), axis=0, keepdims=True)
        else:
            total = over_group(over_rows(each, axis=1), axis=0, keepdims=True)
    return total / group if reduction.group == "mean" else total
