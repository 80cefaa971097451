"""Slot attention on a TPU: one pass over the tiles up to the last visible slot of each kv head.

A kv head's G W query rows are one tile, so keys and values are read once. Steps of the grid beyond a head's last
visible tile fetch nothing and compute nothing, and there are none beyond that of the fullest head.
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

from ..mosaic import (
    LANES,
    SUBLANES,
    VMEM,
    Interpret,
    Softmax,
    check,
    in_place,
    lies_turned,
    params,
    round_up,
    seen,
    tile_size,
)
from ..mosaic_codes import Rows, alike, cleared, logits_of, nbytes_of, read, slots_last, weighed
from ..quantized import QuantizedArray, plain
from ..tiling import Fold, after_last, pad
from ..visibility import visible
from ..window_scores.mosaic_tpu import window_scores
from ..window_scores.reference import Reduction
from .reference import Asked, SlotAttention

TILE_BYTES = 256 << 10  # of keys, and of values
ROWS = 2048  # of queries a kv head, at most
ASKED = 512  # of those that are asked besides; more are in a pass of their own


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
    """As `reference.slot_attention`, which says what it computes.

    Raises NotImplementedError for float16, for more query rows than fit the chip's memory with a tile of keys, and for
    keys and values of 8 or 4 bits that are not quantised alike.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, D = q.shape
    H, S = k.shape[1:3]
    G = Hq // H
    alike(k, v)
    rows = Rows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > ROWS:
        raise NotImplementedError(f"{stacked} query rows a kv head; at most {ROWS} are taken")
    fits = asked is not None and G * asked.positions.shape[1] <= ASKED and asked.reduction.rows != "mean"
    besides = _besides(asked, k, H) if fits and asked is not None else ()
    size = tile_size(S, entries_of_a_tile(nbytes_of(k), stacked + (besides[0].shape[-2] if besides else 0)))
    turned = lies_turned(D) and not isinstance(k, QuantizedArray)
    entries = [jax.tree.map(partial(in_place, interpret=interpret), slots_last(x, turned)) for x in (k, v)]
    lanes = [x.reshape(B * H, 1, S) for x in (k_positions, bias) if x is not None]
    see = jnp.any(visible(q_positions, k_positions, window), axis=2)
    if besides and asked is not None:
        may = (k_positions >= 0) & jnp.any(asked.positions >= 0, axis=1)[:, None, None]
        see |= may
    bound = after_last(see).reshape(-1)
    tiles = ((bound + size - 1) // size).astype(jnp.int32)

    def tile(n: Array, j: Array, tiles: Any) -> Array:
        """The one to fetch: after the last visible one none, which is said by asking for that again."""
        return jnp.minimum(j, jnp.maximum(tiles[n] - 1, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda n, j, tiles: (n, *(0,) * len(shape)))

    def of_row(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, 1), lambda n, j, tiles: (div(n, H), 0, 0))

    def along(lines: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, lines, size), lambda n, j, tiles: (n, 0, tile(n, j, tiles)))

    def blocks(x: Any) -> Any:
        """Of keys or values; what is turned has slots last, and so have scales."""
        if isinstance(x, QuantizedArray):
            specs: Any = {"codes": blocks(x.codes), "scales": along(x.scales.shape[1])}
            return replace(x, **specs)
        if turned:
            return along(x.shape[1])
        return pl.BlockSpec((None, size, x.shape[2]), lambda n, j, tiles: (n, tile(n, j, tiles), 0))

    out_specs = [whole(*rows.shape), whole(R, 1)]
    out_shape = [jax.ShapeDtypeStruct((B * H, *rows.shape), q.dtype), jax.ShapeDtypeStruct((B * H, R, 1), jnp.float32)]
    scratch = Softmax.scratch(rows.shape)
    if besides:
        out_specs.append(along(1))
        out_shape.append(jax.ShapeDtypeStruct((B * H, 1, S), jnp.float32))
    # What slots received is known when the last tile gave the log-sum-exp: all logits stay on the chip till then.
    kept = round_up(S, size)
    keeps = received is not None and 4 * kept * (round_up(R, SUBLANES) + 2 * SUBLANES) <= VMEM // 2
    if keeps:
        out_specs.append(whole(1, kept))
        out_shape.append(jax.ShapeDtypeStruct((B * H, 1, kept), jnp.float32))
        scratch.append(pltpu.VMEM((G * W, kept), jnp.float32))
    body = partial(
        _kernel,
        size=size,
        slots=S,
        scale=scale,
        window=window,
        turned=turned,
        biased=bias is not None,
        reduction=asked.reduction if besides and asked is not None else None,
        fold=received if keeps else None,
        group=G,
        asked=G * asked.positions.shape[1] if asked is not None else 0,
    )
    context, sums, *more = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * H, jnp.maximum(jnp.max(tiles), 1)),
            in_specs=[
                whole(*rows.queries.shape[1:]),
                of_row(R),
                *map(blocks, entries),
                *[along(1)] * len(lanes),
                *[whole(*x.shape[1:]) for x in besides[:2]],
                *[of_row(x.shape[1]) for x in besides[2:]],
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=params("parallel", "arbitrary"),
        interpret=interpret,
        name="slot_attention",
    )(tiles, rows.queries, rows.positions, *entries, *lanes, *besides)
    context, lse = rows.context(context).reshape(q.shape), rows.context(sums).reshape(B, Hq, W)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "interpret": interpret}
    weights = scores = None
    if besides:
        scores = jnp.where(may, more.pop(0).reshape(B, H, S), 0.0)  # what was not fetched is undefined
    elif asked is not None:
        scores = asked.scores(window_scores, plain(k), k_positions, **options)
    if keeps:
        weights = more.pop()[..., :S].reshape(B, H, S)
    elif received is not None:
        reduction = Reduction("sum", received, "group")
        weights = window_scores(q, plain(k), q_positions, k_positions, lse=lse, reduction=reduction, **options)
    return SlotAttention(context, lse, weights, scores)


def _besides(asked: Asked, k: Array | QuantizedArray, heads: int) -> tuple[Array, Array, Array]:
    """Queries of each kv head, their log-sum-exps as a column, inf for one that gives nothing, and their positions."""
    rows = Rows.of(asked.queries, asked.positions, k, heads)
    lse = jnp.where((asked.positions < 0)[:, None] | jnp.isneginf(asked.lse), jnp.inf, asked.lse)
    lse = pad(lse.reshape(len(rows.queries), rows.given, 1), rows.height - rows.given, axis=1, value=jnp.inf)
    return rows.queries, lse, rows.positions


def entries_of_a_tile(nbytes: int, rows: int) -> int:
    """So many of so many bytes that fetching them takes longer than beginning a step, and their logits stay small."""
    most = min(TILE_BYTES // nbytes, (1 << 19) // rows)
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
    turned: bool,
    biased: bool,
    reduction: Reduction | None,
    fold: Fold | None,
    group: int,
    asked: int,
) -> None:
    left = iter(refs)
    bias = next(left) if biased else None
    besides = [next(left) for _ in range(3)] if reduction else []
    out, lse = next(left), next(left)
    scores = next(left) if reduction else None
    received = next(left) if fold else None
    softmax = Softmax(*(next(left) for _ in range(3)))
    kept = next(left) if fold else None
    n, j = pl.program_id(0), pl.program_id(1)

    def place(j: Array) -> Any:
        return slice(None) if slots <= size else pl.ds(pl.multiple_of(j * size, size), size)

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()

    @pl.when(j < tiles[n])
    def _() -> None:
        keys, values, held = jax.tree.map(read, k), jax.tree.map(read, v), None
        if slots % size:  # what a tile has beyond the last slot is not even a number
            held = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < slots - j * size
            values = cleared(values, turned, 0, slots - j * size)

        def logits_from(queries: Any, t: Any) -> Array:
            logits = logits_of(queries[...], keys, turned) * scale
            if bias is not None:
                logits += bias[...]
            return jnp.where(seen(t[...], p[...], window, held), logits, -jnp.inf)

        logits = logits_from(q, t)
        softmax.add(logits, partial(weighed, values, turned))
        if kept is not None:
            kept[:, place(j)] = logits[: kept.shape[0]]
        if reduction is not None and scores is not None:
            queries, sums, at = besides
            weights = jnp.exp(logits_from(queries, at) - sums[...])
            scores[...] = _reduced(weights[:asked], reduction, group)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...], lse[...] = context.astype(out.dtype), sums
        if received is not None and kept is not None and fold is not None:
            how = Reduction("sum", fold, "group")
            received[...] = jnp.zeros(received.shape, jnp.float32)
            finite = jnp.where(sums == -jnp.inf, 0.0, sums)[: kept.shape[0]]

            def receive(j: Array, _: None) -> None:
                received[:, place(j)] = _reduced(jnp.exp(kept[:, place(j)] - finite), how, group)

            jax.lax.fori_loop(0, tiles[n], receive, None)


def _reduced(weights: Float[Array, "G*W K"], how: Reduction, group: int) -> Float[Array, "1 K"]:
    """Over the group and the queries, of which it takes no mean."""
    over_rows, over_group = (jnp.max if x == "max" else jnp.sum for x in (how.rows, how.group))
    if over_rows is over_group or group == 1:
        total = over_rows(weights, axis=0, keepdims=True)
    elif weights.shape[0] == group:
        total = over_group(weights, axis=0, keepdims=True)
    else:
        each = weights.reshape(group, -1, weights.shape[1])
        if how.first == "group":
            total = over_rows(over_group(each, axis=0), axis=0, keepdims=True)
        else:
            total = over_group(over_rows(each, axis=1), axis=0, keepdims=True)
    return total / group if how.group == "mean" else total
