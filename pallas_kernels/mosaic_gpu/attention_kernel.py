"""The body of the Mosaic GPU attention kernel: all query rows of a kv head, over one part of the tiles of its slots."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..quantized import QuantizedArray
from ..segment_attention.pages import PAGE
from ..softmax import finite_or_zero
from .common import Products, over, parts_of, product

STAGES = 2  # tiles in shared memory; two programs of a core have four in flight
LOG2E = math.log2(math.e)


def dequantize(codes: QuantizedArray, stage: Any, tile_ref: Any) -> None:
    """Writes the numbers of a tile of codes. Each part of the channels has one scale, and lies in one half of bytes."""
    groups, halves = codes.scales.shape[1], 8 // codes.bits
    parts = parts_of(groups, codes.bits)
    width = tile_ref.shape[1] // parts
    for i in range(parts):
        half, place = divmod(i, parts // halves)
        part = codes.codes[stage, :, pl.ds(place * width, width)]
        if codes.bits == 8:
            part = part.astype(tile_ref.dtype)
        elif half:  # bytes have operations on bits alone
            part = (part & -16).astype(tile_ref.dtype) * (1 / 16)
        else:
            part = ((part ^ 8) & 15).astype(tile_ref.dtype) - 8
        numbers = part * over(codes.scales[stage, i * groups // parts], part.shape, 0)
        tile_ref[:, pl.ds(i * width, width)] = numbers.astype(tile_ref.dtype)
    plgpu.commit_smem()


def attend_kernel(
    given: dict[str, Any],
    results: dict[str, Any],
    *,
    products: Products,
    splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    width: int,
    extra_reduction: Any,
    q_tile: Any,
    t_tile: Any,
    k_tiles: Any,
    v_tiles: Any,
    k_numbers: Any,
    v_numbers: Any,
    slot_tiles: list[Any],
    weights_tile: Any,
    extra_tiles: Any,
    logits_tile: Any,
    scores_tile: Any,
    out_tile: Any,
    lse_tile: Any,
    q_here: Any,
    k_here: Any,
    v_here: Any,
) -> None:
    """Writes lse and out, and of logits and scores those that `results` has; see `attention.attend`.

    Rows of `q_tile` beyond those that are given hold anything. They see no slot.

    Args:
        scale: of the logits to base 2.
        width: channels per product with values.
        q_here, k_here, v_here: barriers of the copies.
    """
    s, h, b = (jax.lax.axis_index(name) for name in ("split", "head", "batch"))
    heads_per_lane = given["q"].shape[1] // given["k"].shape[1]
    lane = h if heads_per_lane == 1 else jax.lax.div(h, heads_per_lane)
    (rows, D), tile = q_tile.shape, slot_tiles[0].shape[1]
    given_rows = given["q"].shape[2]
    parts: list[Any] = [pl.ds(c, min(width, D - c)) for c in range(0, D, width)]
    used = jnp.where(given["newest"][b] >= 0, given["used"][b, h], 0)
    start = given["start"][b, h] if "start" in given else 0
    tiles = jax.lax.div(used + (tile - 1), tile)
    first, last = jax.lax.div(tiles * s, splits), jax.lax.div(tiles * (s + 1), splits)
    per_slot = [given[name] for name in ("k_positions", "bias") if name in given]

    def fetch_numbers(x: Any, tiles_of: Any, stage: Any, place: Any, here: Any) -> None:
        """Copies a tile of keys or values, or of codes and their scales."""
        if isinstance(x, QuantizedArray):
            of_slots: Any = x.codes.at[b, lane, place], x.scales.at[b, lane, :, place]
            for ref, tile_ref in zip(of_slots, (tiles_of.codes, tiles_of.scales), strict=True):
                plgpu.copy_gmem_to_smem(ref, tile_ref.at[stage], here.at[stage])
        else:
            plgpu.copy_gmem_to_smem(x.at[b, lane, place], tiles_of.at[stage], here.at[stage])

    def numbers(tiles_of: Any, stage: Any, tile_ref: Any) -> Any:
        """The reference to a tile of keys or values. Codes are dequantised to `tile_ref` first."""
        if isinstance(tiles_of, QuantizedArray):
            dequantize(tiles_of, stage, tile_ref)
            return tile_ref
        return tiles_of.at[stage]

    def fetch(j: Any) -> None:
        stage, place = jax.lax.rem(j, STAGES), pl.ds(pl.multiple_of(start + j * tile, PAGE), tile)
        fetch_numbers(given["k"], k_tiles, stage, place, k_here)
        for ref, tiles_of in zip(per_slot, slot_tiles, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[b, lane, place], tiles_of.at[stage], k_here.at[stage])
        fetch_numbers(given["v"], v_tiles, stage, place, v_here)

    plgpu.copy_gmem_to_smem(given["q"].at[b, h], q_tile.at[pl.ds(0, given_rows)], q_here)
    if t_tile is not None:
        plgpu.copy_gmem_to_smem(given["q_positions"].at[b], t_tile, q_here)
    if extra_tiles is not None:
        count, size = extra_tiles.lse.shape
        for i in range(count):
            place = pl.ds(i * size, size)
            plgpu.copy_gmem_to_smem(given["extra"].queries.at[b, h, place], extra_tiles.queries.at[i], q_here)
        plgpu.copy_gmem_to_smem(given["extra"].lse.at[b, h], extra_tiles.lse, q_here)
        plgpu.copy_gmem_to_smem(given["extra"].positions.at[b], extra_tiles.positions, q_here)
    for i in range(STAGES):
        pl.when(first + i < last)(partial(fetch, first + i))
    plgpu.barrier_wait(q_here)

    def positions(shape: tuple[int, ...], axis: int) -> Any:
        """The positions of the query rows, along an axis of a tile."""
        return given["q_positions"][b, 0] if t_tile is None else over(t_tile[...], shape, axis)

    def logits_of(products: Array, j: Any, t: Any, axis: int) -> Array:
        """Logits to base 2 of a tile's products. `axis` is that of its slots; -inf where a slot is not visible."""
        logits = products * scale
        # softcap * tanh(logit / softcap) by an exponential; the hardware's tanh is less accurate
        if softcap is not None:
            logits = softcap * LOG2E * (1 - 2 / (jnp.exp2(logits * (2 / softcap)) + 1))
        p, *bias = (over(x[jax.lax.rem(j, STAGES)], logits.shape, axis) for x in slot_tiles)
        for x in bias:
            logits += x * LOG2E
        slot = j * tile + jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)
        seen = (slot < used) & (p >= 0) & (p <= t)
        if window is not None:
            seen &= t - p < window
        return jnp.where(seen, logits, -jnp.inf)

    def write(j: Any, tile_ref: Any, ref: Any) -> None:
        """Copies a tile to main memory by pages, each of which belongs to one head."""
        for page in range(0, tile, PAGE):
            place = pl.ds(pl.multiple_of(start + j * tile + page, PAGE), PAGE)
            pl.when(j * tile + page < used)(
                partial(plgpu.copy_smem_to_gmem, tile_ref.at[pl.ds(page, PAGE)], ref.at[b, lane, place])
            )

    def add_weights(j: Any, keys: Any, i: Any, scores: Array) -> Array:
        """Joins the weights of a tile of extra rows on the slots of tile j to those of the tiles before."""
        found = product(keys, extra_tiles.queries.at[i], products, transposed=True)
        t, lse = (over(x[i], found.shape, 1) for x in (extra_tiles.positions, extra_tiles.lse))
        weights = jnp.exp2(logits_of(found, j, t, 0) - lse * LOG2E)
        return jnp.maximum(scores, weights) if extra_reduction.tiles == "max" else scores + weights

    def by_slot(j: Any, keys: Any) -> None:
        """Writes logits and scores of tile j: products of keys with queries, so that slots are rows."""
        plgpu.wait_smem_to_gmem(0)  # of the tile before
        if logits_tile is not None:
            found = product(keys, q_tile, products, transposed=True)
            logits_tile[...] = logits_of(found, j, positions(found.shape, 1), 0) * math.log(2)
        if scores_tile is not None:
            count, size = extra_tiles.lse.shape
            scores = jax.lax.fori_loop(0, count, partial(add_weights, j, keys), jnp.zeros((tile, size), jnp.float32))
            scores_tile[...] = jnp.max(scores, axis=1) if extra_reduction.rows == "max" else jnp.sum(scores, axis=1)
        plgpu.commit_smem()
        if logits_tile is not None:
            write(j, logits_tile, results["logits"])
        if scores_tile is not None:
            write(j, scores_tile, results["scores"])

    def add(j: Array, running: tuple[list[Array], Array, Array]) -> tuple[list[Array], Array, Array]:
        """Adds tile j to the running softmax, whose exponentials have base 2."""
        out, total, peak = running
        stage = jax.lax.rem(j, STAGES)
        plgpu.barrier_wait(k_here.at[stage])
        keys = numbers(k_tiles, stage, k_numbers)
        if logits_tile is not None or scores_tile is not None:
            by_slot(j, keys)
        found = product(q_tile, keys, products, transposed=True)
        logits = logits_of(found, j, positions(found.shape, 0), 1)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        finite = finite_or_zero(higher)
        weights = jnp.exp2(logits - over(finite, (rows, tile), 0))
        shrink = jnp.exp2(peak - finite)
        total = total * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(q_tile.dtype)
        if weights_tile is not None:  # a warp computed the weights of some slots, and needs those of all
            weights_tile[...] = weights
            weights = weights_tile
        plgpu.barrier_wait(v_here.at[stage])
        values = numbers(v_tiles, stage, v_numbers)
        out = [
            x * over(shrink, x.shape, 0) + product(weights, values.at[:, part], products)
            for x, part in zip(out, parts, strict=True)
        ]
        pl.when(j + STAGES < last)(partial(fetch, j + STAGES))
        return out, total, higher

    zeros = jnp.zeros(rows, jnp.float32)
    none = [jnp.zeros((rows, part.size), jnp.float32) for part in parts], zeros, jnp.full(rows, -jnp.inf, jnp.float32)
    out, total, peak = jax.lax.fori_loop(first, last, add, none)
    total = jnp.where(total == 0, 1.0, total)
    lse_tile[...] = peak * math.log(2) + jnp.log(total)
    for x, part in zip(out, parts, strict=True):
        place = pl.ds(0, part.size)
        out_tile[:, place] = (x / over(total, x.shape, 0)).astype(out_tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, given_rows), place], results["out"].at[b, h, s, :, part])
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(lse_tile.at[pl.ds(0, given_rows)], results["lse"].at[b, h, s])
    plgpu.wait_smem_to_gmem(0)
