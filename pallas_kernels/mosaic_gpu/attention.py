"""Attention of a kv head's query rows over its slots on GPUs since Hopper (Pallas, Mosaic GPU): sizes and launch.

A program takes all query rows of a kv head and walks over a part of its slots with a running softmax (FlashAttention,
arXiv 2205.14135). The tensor memory accelerator (TMA) copies keys, values and positions of the next tiles to shared
memory meanwhile. The programs of a head are joined by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..arrays import after_last, fold, pad
from ..quantized import QuantizedArray
from ..segment_attention.pages import PAGE
from ..slot_attention.asked import ExtraReduction, ExtraRows
from ..softmax import finite_or_zero
from .attention_kernel import LOG2E, STAGES, attend_kernel
from .common import MOST_ROWS, Products, interpreted

TILE_ELEMENTS = 8 << 10  # of a tile of keys: 32 KiB of keys and values in 16 bits
PROGRAMS = 264  # programs that a GPU should run at a time: two per core of an H100
LEAST_TILES = 2  # tiles per program, if programs share them
MOST_SPLITS = 64  # programs that share the tiles of a head
MOST_SUMS = 64 * 128  # numbers of a program's context: more would need more registers than there are
CHANNELS = 64  # channels of a product with values: more would need more registers for the sum of the products so far


class AttendOutput(NamedTuple):
    """The results of `attend`.

    Attributes:
        out: the context in q's dtype.
        lse: float32 log-sum-exp; -inf where nothing is visible, and `out` is then 0.
        logits: float32, biased, -inf where a slot is not visible; undefined in pages that are not read.
        scores: float32, what each slot received from the extra rows; undefined in pages that are not read.
    """

    out: Float[Array, "B H R D"]
    lse: Float[Array, "B H R"]
    logits: Float[Array, "B P R T"] | None
    scores: Float[Array, "B P T"] | None


def tile_slots(head_dim: int) -> int:
    """Slots per tile."""
    return max(64, TILE_ELEMENTS // pl.next_power_of_2(max(head_dim, 64)))


def splits_of(heads: int, slots: int, tile: int) -> int:
    """The number of programs that share the tiles of a head.

    Args:
        heads: kv heads of all batch rows.
        tile: slots per tile.
    """
    return max(1, min(PROGRAMS // heads, pl.cdiv(slots, LEAST_TILES * tile), MOST_SPLITS))


def attend(
    q: Float[Array, "B H R D"],
    k: Float[Array, "B P T D"],
    v: Float[Array, "B P T D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    used: Int[Array, "B H"] | None = None,
    start: Int[Array, "B H"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    extra: ExtraRows | None = None,
    extra_reduction: ExtraReduction | None = None,
    products: Products,
    tile: int | None = None,
    splits: int | None = None,
) -> AttendOutput:
    """Attention of the R = G W rows of each kv head. Row r is a query at position q_positions[:, r mod W].

    Args:
        k, v: P lanes of T slots, with H / P consecutive heads per lane.
        used: the number of slots that are read; up to the last occupied one if None. No slot is read if all queries,
            extra rows included, have position -1.
        start: the first slot of a head in its lane, a multiple of PAGE; 0 if None.
        logits: whether to return the logits.
        extra: extra query rows.
        extra_reduction: how their weights are reduced to one number per slot.
        products: what multiplies matrices; see `Products`.
        tile: slots per tile, a multiple of 64; `tile_slots` if None.
        splits: programs per kv head; `splits_of` if None.

    Raises:
        NotImplementedError: for more query rows than a program has registers for.
    """
    B, H, R, D = q.shape
    P, T = k.shape[1:3]
    tile = tile or tile_slots(D)
    splits = splits or splits_of(B * H, T, tile)
    rows = MOST_ROWS if products == "wgmma" else max(16, pl.next_power_of_2(R))
    if rows * D > MOST_SUMS:
        raise NotImplementedError(
            f"{R} query rows of {D} channels, as {rows} rows: expected at most {MOST_SUMS} numbers"
        )
    width = min(CHANNELS, D)
    out_dtype = q.dtype if splits == 1 else jnp.float32
    written = R + -R % 8  # TMA copies whole tiles of 8 rows, and multiples of 16 bytes
    t, p = q_positions.astype(jnp.int32), k_positions.astype(jnp.int32)
    newest = jnp.max(t, axis=1)
    one = t.shape[1] == 1  # all rows have the position that a program reads as a number
    if not one:
        t = pad(jnp.tile(t, (1, R // t.shape[1])), rows - R, 1, -1)
    extra_tiles: Any = None
    if extra is not None and extra_reduction is not None:
        newest = jnp.maximum(newest, jnp.max(extra.positions, axis=1))
        tiles = (extra.lse.shape[2] // extra_reduction.size, extra_reduction.size)
        extra = extra._replace(lse=extra.lse.reshape(B, H, *tiles), positions=extra.positions.reshape(B, *tiles))
        kinds: Any = ((*tiles, D), q.dtype), (tiles, jnp.float32), (tiles, jnp.int32)
        extra_tiles = ExtraRows._make(plgpu.SMEM(*kind) for kind in kinds)
    given: dict[str, Any] = {
        "q": pad(q, written - R, 2),
        "k": by_group(k),
        "v": by_group(v),
        "q_positions": t,
        "k_positions": p,
        "newest": newest,
        "used": after_last(p >= 0) if used is None else used,
    }
    options = {"start": start, "bias": None if bias is None else bias.astype(jnp.float32), "extra": extra}
    given |= {name: x for name, x in options.items() if x is not None}
    results = {
        "out": jax.ShapeDtypeStruct((B, H, splits, written, D), out_dtype),
        "lse": jax.ShapeDtypeStruct((B, H, splits, written), jnp.float32),
    }
    pages = T + -T % PAGE  # which are written whole
    if logits:
        results["logits"] = jax.ShapeDtypeStruct((B, P, pages, rows), jnp.float32)
    if extra is not None:
        results["scores"] = jax.ShapeDtypeStruct((B, P, pages), jnp.float32)
    scratch: dict[str, Any] = {
        "q_tile": plgpu.SMEM((rows, D), q.dtype),
        "t_tile": None if one else plgpu.SMEM((rows,), jnp.int32),
        "k_tiles": tiles_of(given["k"], tile),
        "v_tiles": tiles_of(given["v"], tile),
        "k_numbers": plgpu.SMEM((tile, D), q.dtype) if isinstance(k, QuantizedArray) else None,
        "v_numbers": plgpu.SMEM((tile, D), q.dtype) if isinstance(v, QuantizedArray) else None,
        "slot_tiles": [plgpu.SMEM((STAGES, tile), given[x].dtype) for x in ("k_positions", "bias") if x in given],
        "weights_tile": None if products == "wgmma" else plgpu.SMEM((rows, tile), v.dtype),
        "extra_tiles": extra_tiles,
        "logits_tile": plgpu.SMEM((tile, rows), jnp.float32) if logits else None,
        "scores_tile": None if extra is None else plgpu.SMEM((tile,), jnp.float32),
        "out_tile": plgpu.SMEM((rows, width), out_dtype),
        "lse_tile": plgpu.SMEM((rows,), jnp.float32),
        "q_here": plgpu.Barrier(num_arrivals=2 - one + (0 if extra_tiles is None else tiles[0] + 2)),
        "k_here": plgpu.Barrier(num_arrivals=len(jax.tree.leaves(k)) + (1 if bias is None else 2), num_barriers=STAGES),
        "v_here": plgpu.Barrier(num_arrivals=len(jax.tree.leaves(v)), num_barriers=STAGES),
    }
    found = plgpu.kernel(
        partial(
            attend_kernel,
            products=products,
            splits=splits,
            scale=scale * LOG2E,
            window=window,
            softcap=softcap,
            width=width,
            extra_reduction=extra_reduction,
        ),
        out_type=results,
        grid=(splits, H, B),
        grid_names=("split", "head", "batch"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpreted(ragged=start is not None or T % tile != 0) if products == "lax" else None,
        kernel_name="mosaic_gpu_attend",
    )(given)
    out, lse = join(found["out"][:, :, :, :R], found["lse"][:, :, :, :R], q.dtype)
    met = found["logits"][:, :, :T, :R].swapaxes(2, 3) if logits else None
    return AttendOutput(out, lse, met, None if extra is None else found["scores"][:, :, :T])


def by_group(x: Any) -> Any:
    """Keys or values as the kernel gets them: scales of codes as [B, P, groups, T], because TMA copies 16 bytes."""
    return replace(x, scales=x.scales.swapaxes(2, 3)) if isinstance(x, QuantizedArray) else x


def tiles_of(x: Any, tile: int) -> Any:
    """Shared memory for tiles of keys or values."""
    if not isinstance(x, QuantizedArray):
        return plgpu.SMEM((STAGES, tile, x.shape[-1]), x.dtype)
    codes: Any = plgpu.SMEM((STAGES, tile, x.codes.shape[-1]), jnp.int8)
    scales: Any = plgpu.SMEM((STAGES, x.scales.shape[2], tile), x.scales.dtype)
    return replace(x, codes=codes, scales=scales)


def join(
    out: Float[Array, "B H splits R D"], lse: Float[Array, "B H splits R"], dtype: Any
) -> tuple[Float[Array, "B H R D"], Float[Array, "B H R"]]:
    """Joins softmaxes over different slots into one, by their log-sum-exps."""
    if lse.shape[2] == 1:
        return jnp.squeeze(out, 2), jnp.squeeze(lse, 2)
    peak = fold(lse, "max", 2)
    shares = jnp.exp(lse - finite_or_zero(peak)[:, :, None])
    total = fold(shares, "sum", 2)
    joined = fold(out * shares[..., None], "sum", 2) / jnp.where(total == 0, 1.0, total)[..., None]
    return joined.astype(dtype), peak + jnp.log(total)
