"""Attention of query rows over slots on GPUs (Pallas, Triton), for all attention operations: sizes and launch.

A program takes a block of the query rows of one kv head, of all query heads that share it, and walks over its slots
tile by tile with a running softmax (FlashAttention, arXiv 2205.14135). It stops at the last occupied slot. If there
are too few rows to fill a GPU, several programs take turns in the tiles of a head, and a second kernel joins their
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from ..arrays import after_last
from ..quantized import QuantizedArray
from ..slot_attention.asked import ExtraReduction, ExtraRows
from ..softmax import finite_or_zero
from .attention_kernel import SCANNED, attend_kernel
from .blocks import Blocks, Work, measured, power_of_two, small_cores
from .codes import code_rows
from .common import PROGRAMS

MOST_SPLITS = 64  # programs that share the tiles of one block of rows
SEGMENT_PROGRAMS = 4 * PROGRAMS  # for segments, whose lengths differ: programs that end early make room for others
LEAST_TILES = 2  # tiles per program, if programs share them
MOST_SCANS = 8  # reads of positions by which a program finds its last tile; by estimate, a launch takes as long


class AttendOutput(NamedTuple):
    """The results of `attend`.

    Attributes:
        out: the context in q's dtype; None if no values were given.
        lse: float32 log-sum-exp; -inf where nothing is visible, and `out` is then 0.
        logits: float32, biased, -inf where a slot is not visible; undefined in tiles that are not read.
        scores: float32, what each slot received from the extra rows; undefined in tiles that are not read.
    """

    out: Float[Array, "B H R Dv"] | None
    lse: Float[Array, "B H R"]
    logits: Float[Array, "B P R T"] | None
    scores: Float[Array, "B P T"] | None


def attend_blocks(rows: int, k: Any, extra: int = 0, value_dim: int = 0) -> Blocks:
    """Tile sizes for this GPU: measured, or by rule from the number of rows, the head size and the stored size.

    By the rule, keys and values of a tile take 32 KiB. Beside the query rows there are as many tiles as stages, less
    one. Where a core is small, 32 KiB of query rows leave room for one tile. Quantised tiles take less memory, but
    registers twice: as codes and as numbers.

    Args:
        rows: query rows per kv head.
        k: keys [..., D], an array or a QuantizedArray.
        extra: extra query rows per kv head. More than 32 take the memory of half a tile.
        value_dim: channels of values, if they may be more than those of keys.
    """
    found = None if extra else measured(Work.of("attend", rows, k))
    if found is not None:
        return found
    quantized, head_dim, part = isinstance(k, QuantizedArray), k.shape[-1], 2 if extra > 32 else 1
    channels = power_of_two(max(head_dim, value_dim))
    itemsize = jnp.dtype(k.dtype).itemsize
    full = small_cores() and channels > 128 and (power_of_two(rows) + extra) * itemsize >= 128  # with one tile
    if itemsize == 4:  # float32 uses no tensor cores, and more registers
        return Blocks(min(power_of_two(rows), 32), 16 if quantized or full else 32 // part, warps=8, stages=2)
    slots = max(16, 8 * 1024 // channels // part)
    if quantized and rows > 32:
        return Blocks(64 if head_dim <= 128 else 32, max(16, slots // 2), warps=4, stages=3)
    if rows > 64 and head_dim <= 128:
        return Blocks(128, slots, warps=8, stages=3)
    # Four warps would spill 60 bytes of a thread's registers where two tiles do not fit.
    return Blocks(min(power_of_two(rows), 64), slots, *((8, 2) if full else (4, 3)))


def attend(
    q: Float[Array, "B H R D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T Dv"] | QuantizedArray | None,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    used: Int[Array, "B H"] | None = None,
    start: Int[Array, "B H"] | None = None,
    spans: Int[Array, "B H row_blocks 2"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    extra: ExtraRows | None = None,
    extra_reduction: ExtraReduction | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> AttendOutput:
    """Attention of the R = G W rows of each kv head. Row r is a query at position q_positions[:, r mod W].

    Args:
        k, v: P lanes of T slots, with H / P consecutive heads per lane. Arrays may differ in their number of channels.
        used: the number of slots that are read; up to the last occupied one if None. No slot is read if all queries,
            extra rows included, have position -1.
        start: the first slot of a head in its lane; 0 if None.
        spans: the first tile that each block of rows reads and the tile after the last; all used tiles if None.
        logits: whether to return the logits.
        extra: extra query rows. All attending rows must then fit into one block.
        extra_reduction: how their weights are reduced to one number per slot.
        blocks: tile sizes; those of `attend_blocks` if None.
    """
    B, H, R, D = q.shape
    P, T = k.shape[1:3]
    W = q_positions.shape[1]
    Dv = D if v is None else v.shape[-1]
    Dp, Dvp = power_of_two(D), power_of_two(Dv)
    blocks = blocks or attend_blocks(R, k, 0 if extra is None else extra.lse.shape[2], Dv)
    height = None if extra is not None else code_rows(R, k, v)
    if height is not None:
        blocks = blocks._replace(rows=height)
    row_blocks = pl.cdiv(R, blocks.rows)
    programs = PROGRAMS if start is None else SEGMENT_PROGRAMS
    splits = max(1, min(programs // (B * H * row_blocks), pl.cdiv(T, LEAST_TILES * blocks.slots), MOST_SPLITS))
    if used is None and MOST_SCANS * SCANNED * splits < T:
        used = after_last(k_positions >= 0)
    ragged = start is not None or T % blocks.slots != 0 or blocks.slots > T

    def head(*shape: int) -> pl.BlockSpec:
        """One head's part of an array with axes [B, H, ...]."""
        return pl.BlockSpec((None, None, *shape), lambda s, i, h, b: (b, h, *(0,) * len(shape)))

    def lane(*shape: int) -> pl.BlockSpec:
        """The lane of one head in an array with axes [B, P, ...]."""
        return pl.BlockSpec((None, None, *shape), lambda s, i, h, b: (b, h * P // H, *(0,) * len(shape)))

    def entries(x: Array | QuantizedArray) -> Any:
        if isinstance(x, QuantizedArray):
            return jax.tree.map(lambda array: lane(T, array.shape[-1]), x)
        return lane(T, power_of_two(x.shape[-1]))

    def part(*shape: int) -> pl.BlockSpec:
        """One split's block of rows in an array with axes [B, H, splits, R, ...]."""
        return pl.BlockSpec((None, None, None, *shape), lambda s, i, h, b: (b, h, s, i, *(0,) * (len(shape) - 1)))

    out_dtype = q.dtype if splits == 1 else jnp.float32
    shapes = {"lse": jax.ShapeDtypeStruct((B, H, splits, R), jnp.float32)}
    specs = {"lse": part(blocks.rows)}
    if v is not None:
        shapes["out"] = jax.ShapeDtypeStruct((B, H, splits, R, Dv), out_dtype)
        specs["out"] = part(blocks.rows, Dvp)
    if logits:
        shapes["logits"] = jax.ShapeDtypeStruct((B, P, R, T), jnp.float32)
        specs["logits"] = lane(R, T)
    extra_specs = None
    if extra is not None:
        X = extra.positions.shape[1]
        rows: list[Any] = [head(X, Dp), head(X), pl.BlockSpec((None, X), lambda s, i, h, b: (b, 0))]
        extra_specs = ExtraRows(*rows)
        shapes["scores"] = jax.ShapeDtypeStruct((B, P, T), jnp.float32)
        specs["scores"] = lane(T)
    results = pl.pallas_call(
        partial(
            attend_kernel,
            blocks=blocks,
            splits=splits,
            sizes=(R, W, D, Dv),
            scale=scale,
            window=window,
            softcap=softcap,
            ragged=ragged,
            extra_reduction=extra_reduction,
            multiplies_codes=height is not None,
        ),
        grid=(splits, row_blocks, H, B),
        in_specs=[
            pl.BlockSpec((None, None, blocks.rows, Dp), lambda s, i, h, b: (b, h, i, 0)),
            entries(k),
            None if v is None else entries(v),
            pl.BlockSpec((None, W), lambda s, i, h, b: (b, 0)),
            lane(T),
            None if used is None else head(),
            None if start is None else head(),
            None if spans is None else head(row_blocks, 2),
            None if bias is None else lane(T),
            extra_specs,
        ],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
    )(q, k, v, q_positions, k_positions, used, start, spans, bias, extra)
    out, lse = join(results.get("out"), results["lse"], q.dtype, interpret=interpret)
    return AttendOutput(out, lse, results.get("logits"), results.get("scores"))


def join(
    out: Float[Array, "B H splits R D"] | None,
    lse: Float[Array, "B H splits R"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B H R D"] | None, Float[Array, "B H R"]]:
    """Joins the results of programs that each attended to a part of the slots.

    Args:
        out: the context of each part; None if no values were given.
        lse: the float32 log-sum-exp of each part.
        dtype: the dtype of the joined context.
    """
    B, H, splits, R = lse.shape
    if splits == 1:
        return None if out is None else jnp.squeeze(out, 2).astype(dtype), jnp.squeeze(lse, 2)
    if out is None:
        return None, jax.nn.logsumexp(lse, axis=2)
    D = out.shape[-1]
    padded, Dp = power_of_two(splits), power_of_two(D)
    row = pl.BlockSpec((None, None, None), lambda r, h, b: (b, h, r))
    return pl.pallas_call(
        partial(join_kernel, sizes=(splits, D)),
        grid=(R, H, B),
        in_specs=[
            pl.BlockSpec((None, None, padded, None, Dp), lambda r, h, b: (b, h, 0, r, 0)),
            pl.BlockSpec((None, None, padded, None), lambda r, h, b: (b, h, 0, r)),
        ],
        out_specs=[pl.BlockSpec((None, None, None, Dp), lambda r, h, b: (b, h, r, 0)), row],
        out_shape=[jax.ShapeDtypeStruct((B, H, R, D), dtype), jax.ShapeDtypeStruct((B, H, R), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(out, lse)


def join_kernel(out_ref: Any, lse_ref: Any, joined_ref: Any, joined_lse_ref: Any, *, sizes: Sequence[int]) -> None:
    splits, D = sizes
    padded, Dp = out_ref.shape
    part, channel = jnp.arange(padded) < splits, jnp.arange(Dp) < D
    lse = plgpu.load(lse_ref, mask=part, other=-jnp.inf)
    out = plgpu.load(out_ref, mask=part[:, None] & channel[None], other=0)
    peak = jnp.max(lse)
    shares = jnp.exp(lse - finite_or_zero(peak))
    total = jnp.sum(shares)
    total = jnp.where(total == 0, 1.0, total)
    joined = jnp.sum(out * (shares / total)[:, None], axis=0)
    plgpu.store(joined_ref, joined.astype(joined_ref.dtype), mask=channel)
    joined_lse_ref[()] = peak + jnp.log(total)
