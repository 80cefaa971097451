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
from ..tiling import Fold, after_last
from ..visibility import visible
from ..window_scores.mosaic_tpu import window_scores
from ..window_scores.reference import Reduction

TILE_BYTES = 256 << 10  # of keys, and of values
ROWS = 2048  # of queries a kv head, at most


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
    interpret: Interpret = False,
) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"], Float[Array, "B H S"] | None]:
    """As `reference.slot_attention`, which says what it computes.

    Raises NotImplementedError for float16, for more query rows than fit the chip's memory with a tile of keys, and for
    keys and values of 8 or 4 bits that are not quantised alike.
    """
    check(q, k, v, quantized=True)
    B, Hq, W, _ = q.shape
    H, S = k.shape[1:3]
    G = Hq // H
    alike(k, v)
    rows = Rows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > ROWS:
        raise NotImplementedError(f"{stacked} query rows a kv head; at most {ROWS} are taken")
    size = tile_size(S, entries_of_a_tile(nbytes_of(k), stacked))
    turned = lies_turned(rows.queries.shape[-1])
    entries = [jax.tree.map(partial(in_place, interpret=interpret), slots_last(x, turned)) for x in (k, v)]
    lanes = [x.reshape(B * H, 1, S) for x in (k_positions, bias) if x is not None]
    see = jnp.any(visible(q_positions, k_positions, window), axis=2)
    bound = after_last(see).reshape(-1)
    tiles = ((bound + size - 1) // size).astype(jnp.int32)

    def tile(n: Array, j: Array, tiles: Any) -> Array:
        """The one to fetch: after the last visible one none, which is said by asking for that again."""
        return jnp.minimum(j, jnp.maximum(tiles[n] - 1, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda n, j, tiles: (n, *(0,) * len(shape)))

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
        fold=(received, G) if received and keeps else None,
    )
    context, lse, *weights = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * H, jnp.maximum(jnp.max(tiles), 1)),
            in_specs=[
                whole(*rows.queries.shape[1:]),
                pl.BlockSpec((None, R, 1), lambda n, j, tiles: (div(n, H), 0, 0)),
                *map(blocks, entries),
                *[along(1)] * len(lanes),
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=params("parallel", "arbitrary"),
        interpret=interpret,
        name="slot_attention",
    )(tiles, rows.queries, rows.positions, *entries, *lanes)
    context, lse = rows.context(context).reshape(q.shape), rows.context(lse).reshape(B, Hq, W)
    if keeps:
        return context, lse, weights[0][..., :S].reshape(B, H, S)
    if received is None:
        return context, lse, None
    again = window_scores(
        q,
        plain(k),
        q_positions,
        k_positions,
        scale=scale,
        lse=lse,
        window=window,
        bias=bias,
        reduction=Reduction("sum", received, "group"),
        interpret=interpret,
    )
    return context, lse, again


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
    fold: tuple[Fold, int] | None,
) -> None:
    bias, refs = (refs[0], refs[1:]) if biased else (None, refs)
    (out, lse), refs = refs[:2], refs[2:]
    received, refs = (refs[0], refs[1:]) if fold else (None, refs)
    softmax = Softmax(*refs[:3])
    n, j = pl.program_id(0), pl.program_id(1)

    def place(j: Array) -> Any:
        return slice(None) if slots <= size else pl.ds(pl.multiple_of(j * size, size), size)

    @pl.when(j == 0)
    def _() -> None:
        softmax.begin()

    @pl.when(j < tiles[n])
    def _() -> None:
        logits = logits_of(q[...], jax.tree.map(read, k), turned) * scale
        if bias is not None:
            logits += bias[...]
        values, held = jax.tree.map(read, v), None
        if slots % size:  # what a tile has beyond the last slot is not even a number
            held = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < slots - j * size
            values = cleared(values, turned, 0, slots - j * size)
        logits = jnp.where(seen(t[...], p[...], window, held), logits, -jnp.inf)
        softmax.add(logits, partial(weighed, values, turned))
        if fold:
            refs[3][:, place(j)] = logits[: refs[3].shape[0]]

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        context, sums = softmax.end()
        out[...], lse[...] = context.astype(out.dtype), sums
        if received is not None and fold:
            received[...] = jnp.zeros(received.shape, jnp.float32)
            finite = jnp.where(sums == -jnp.inf, 0.0, sums)[: refs[3].shape[0]]

            def receive(j: Array, _: None) -> None:
                received[:, place(j)] = _fold(jnp.exp(refs[3][:, place(j)] - finite), *fold)

            jax.lax.fori_loop(0, tiles[n], receive, None)


def _fold(weights: Float[Array, "G*W K"], how: Fold, group: int) -> Float[Array, "1 K"]:
    """Over the group, then summed over the queries."""
    if how != "max":
        return jnp.sum(weights, axis=0, keepdims=True) / (group if how == "mean" else 1)
    if weights.shape[0] == group:
        return jnp.max(weights, axis=0, keepdims=True)
    each = weights.reshape(group, -1, weights.shape[1])
    return jnp.sum(jnp.max(each, axis=0), axis=0, keepdims=True)
