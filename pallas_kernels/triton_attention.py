"""Attention of query rows over slots as a Pallas kernel for GPUs, by Triton: what the attention operations share.

A program holds a block of the query rows of one kv head, of all query heads that share it, and walks over its slots
tile by tile with a running softmax (FlashAttention, arXiv 2205.14135). It stops at the bound of what is occupied.
Where there are too few rows to fill a GPU, the tiles are divided among several programs, and what these find is joined
by their log-sum-exps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from .blocks import Blocks, Work, measured, power_of_two
from .quantized import QuantizedArray

PROGRAMS = 264  # at a time: two for each core of an H100
SPLITS = 64  # at most


class Attended(NamedTuple):
    """What rows found.

    Attributes:
        out: in v's dtype; None if there were no values.
        lse: -inf where nothing is visible, and `out` then 0.
        logits: of each slot, biased and with -inf where it is not visible; undefined beyond `used`.
        scores: what each slot received from the rows that were asked; undefined beyond `used`.
    """

    out: Float[Array, "B H R D"] | None
    lse: Float[Array, "B H R"]
    logits: Float[Array, "B H R T"] | None
    scores: Float[Array, "B H T"] | None


class AskedRows(NamedTuple):
    """Query rows that have attended before, and are asked on the way what they give to each slot.

    Attributes:
        lse: inf for a row that gives nothing.
    """

    queries: Float[Array, "B H N D"]
    lse: Float[Array, "B H N"]
    positions: Int[Array, "B N"]


class Joins(NamedTuple):
    """How what asked rows give becomes one number: tiles of rows one by one, then the rows of what that makes.

    Attributes:
        size: rows of a tile, which divides their number; a power of two, 16 or more.
        tiles: "sum" or "max".
        rows: likewise.
    """

    size: int
    tiles: str
    rows: str


def blocks_for(rows: int, k: Any, asked: int = 0) -> Blocks:
    """As measured on this GPU, or by the number of rows a kv head, the head dimension and what a number takes.

    Keys and values of a tile take 32 KiB, three of which a core of any GPU since the A100 holds twice. Quantised ones
    take less of that, but registers twice, as codes and as numbers. More than 32 rows that are `asked` besides take the
    room of half a tile.
    """
    found = None if asked else measured(Work.of("attend", rows, k))
    if found is not None:
        return found
    quantized, head_dim, part = isinstance(k, QuantizedArray), k.shape[-1], 2 if asked > 32 else 1
    if jnp.dtype(k.dtype).itemsize == 4:  # no tensor cores, and registers instead
        return Blocks(min(power_of_two(rows), 32), 16 if quantized else 32 // part, warps=8, stages=2)
    slots = max(16, 8 * 1024 // power_of_two(head_dim) // part)
    if quantized and rows > 32:
        return Blocks(64 if head_dim <= 128 else 32, max(16, slots // 2), warps=4, stages=3)
    if rows > 64 and head_dim <= 128:
        return Blocks(128, slots, warps=8, stages=3)
    return Blocks(min(power_of_two(rows), 64), slots, warps=4, stages=3)


def check_device() -> None:
    """Raises NotImplementedError on a GPU that these kernels are not for. What is compiled ahead is not looked at."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "8.0")
    if not re.fullmatch(r"\d+\.\d", capability):
        raise NotImplementedError(f"GPUs of kind {capability}; NVIDIA's are taken")
    if float(capability) < 8:
        raise NotImplementedError(f"GPUs of compute capability {capability}; 8.0 or more is taken")


def check(q: Any, k: Any, v: Any, quantized: bool = False) -> None:
    """Raises NotImplementedError for what a kernel does not take, be it one that takes `quantized` keys and values."""
    check_device()
    arrays = [x for x in (q, k, v) if x is not None]
    for x in arrays:
        if quantized and isinstance(x, QuantizedArray):
            check_codes(x)
        elif not isinstance(x, jax.Array | np.ndarray):
            raise NotImplementedError("keys and values that are not plain arrays")
    kinds = {jnp.dtype(x.dtype).name for x in arrays}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16", "float16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}; one of float32, bfloat16 and float16 is taken")
    if q.shape[-1] > 256:
        raise NotImplementedError(f"heads of {q.shape[-1]} channels; at most 256 are taken")


def check_codes(x: QuantizedArray) -> None:
    """Raises NotImplementedError for codes of which no tile can be made. Two of 4 bits a byte give two half as wide."""
    D, least = x.shape[-1], 16 * parts(x)
    if power_of_two(D, least) != D:
        raise NotImplementedError(f"heads of {D} channels in {x.bits} bits; powers of two from {least} on are taken")


def parts(x: Array | QuantizedArray) -> int:
    """In how many tiles channels come: bytes with two codes each make two, of both halves of the channels."""
    return 2 if isinstance(x, QuantizedArray) and x.bits == 4 else 1


def dequantized(codes: Int[Array, "T C"], scales: Float[Array, "T groups"], dtype: Any) -> Float[Array, "T C"]:
    """A tile as `QuantizedArray.dequantized` has it: bfloat16 rounds a product of two of it once, as float32 does."""
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    T, groups = scales.shape
    scales = jnp.broadcast_to(scales.astype(wide)[:, :, None], (T, groups, codes.shape[1] // groups))
    return (codes.astype(wide) * scales.reshape(codes.shape)).astype(dtype)


def product(x: Array, y: Array) -> Float[Array, "M N"]:
    """x @ y in float32; on tensor cores unless x and y are float32 themselves."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def attend(
    q: Float[Array, "B H R D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T D"] | QuantizedArray | None,
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B P T"],
    used: Int[Array, "B H"],
    start: Int[Array, "B H"] | None = None,
    span: Int[Array, "B H row_blocks 2"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B P T"] | None = None,
    logits: bool = False,
    asked: AskedRows | None = None,
    joins: Joins | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Attended:
    """Attention of R = G W rows of each kv head, row r being a query at position r mod W.

    Args:
        k, v: P lanes of T slots, H / P consecutive heads to a lane.
        used: how many slots are looked at; none where the positions of all queries, those asked too, are -1.
        start: where a head's slots begin in its lane; at 0 if None.
        span: the first tile that each block of rows looks at, and the one after the last; all that are used if None.
        logits: whether to return them.
        asked: rows that are asked besides, if all that attend fit into one block and each head has a lane of its own.
        joins: how what they give is joined.
    """
    B, H, R, D = q.shape
    P, T = k.shape[1:3]
    W = q_positions.shape[1]
    Dp = power_of_two(D)
    blocks = blocks or blocks_for(R, k, 0 if asked is None else asked.lse.shape[2])
    row_blocks = pl.cdiv(R, blocks.rows)
    splits = max(1, min(PROGRAMS // (B * H * row_blocks), pl.cdiv(T, 4 * blocks.slots), SPLITS))
    ragged = start is not None or T % blocks.slots != 0 or blocks.slots > T

    def head(*shape: int) -> pl.BlockSpec:
        """A head's part of an array with axes [B, H, ...]."""
        return pl.BlockSpec((None, None, *shape), lambda s, i, h, b: (b, h, *(0,) * len(shape)))

    def lane(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda s, i, h, b: (b, h * P // H, *(0,) * len(shape)))

    def entries(x: Array | QuantizedArray) -> Any:
        if isinstance(x, QuantizedArray):
            return jax.tree.map(lambda array: lane(T, array.shape[-1]), x)
        return lane(T, Dp)

    def part(*shape: int) -> pl.BlockSpec:
        """A split's block of rows in an array with axes [B, H, splits, R, ...]."""
        return pl.BlockSpec((None, None, None, *shape), lambda s, i, h, b: (b, h, s, i, *(0,) * (len(shape) - 1)))

    out_dtype = q.dtype if splits == 1 else jnp.float32
    found = {"lse": jax.ShapeDtypeStruct((B, H, splits, R), jnp.float32)}
    specs = {"lse": part(blocks.rows)}
    if v is not None:
        found["out"] = jax.ShapeDtypeStruct((B, H, splits, R, D), out_dtype)
        specs["out"] = part(blocks.rows, Dp)
    if logits:
        found["logits"] = jax.ShapeDtypeStruct((B, H, R, T), jnp.float32)
        specs["logits"] = head(R, T)
    asked_specs = None
    if asked is not None:
        N = asked.positions.shape[1]
        rows: list[Any] = [head(N, Dp), head(N), pl.BlockSpec((None, N), lambda s, i, h, b: (b, 0))]
        asked_specs = AskedRows(*rows)
        found["scores"] = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
        specs["scores"] = head(T)
    results = pl.pallas_call(
        partial(
            attend_kernel,
            blocks=blocks,
            splits=splits,
            sizes=(R, W, D),
            scale=scale,
            window=window,
            ragged=ragged,
            joins=joins,
        ),
        grid=(splits, row_blocks, H, B),
        in_specs=[
            pl.BlockSpec((None, None, blocks.rows, Dp), lambda s, i, h, b: (b, h, i, 0)),
            entries(k),
            None if v is None else entries(v),
            pl.BlockSpec((None, W), lambda s, i, h, b: (b, 0)),
            lane(T),
            head(),
            None if start is None else head(),
            None if span is None else head(row_blocks, 2),
            None if bias is None else lane(T),
            asked_specs,
        ],
        out_specs=specs,
        out_shape=found,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
    )(q, k, v, q_positions, k_positions, used.astype(jnp.int32), start, span, bias, asked)
    out, lse = join(results.get("out"), results["lse"], q.dtype, interpret=interpret)
    return Attended(out, lse, results.get("logits"), results.get("scores"))


def join(
    out: Float[Array, "B H X R D"] | None, lse: Float[Array, "B H X R"], dtype: Any, *, interpret: bool = False
) -> tuple[Float[Array, "B H R D"] | None, Float[Array, "B H R"]]:
    """One softmax from X over different slots."""
    B, H, X, R = lse.shape
    if X == 1:
        return None if out is None else jnp.squeeze(out, 2).astype(dtype), jnp.squeeze(lse, 2)
    if out is None:
        return None, jax.nn.logsumexp(lse, axis=2)
    D = out.shape[-1]
    Xp, Dp = power_of_two(X), power_of_two(D)
    row = pl.BlockSpec((None, None, None), lambda r, h, b: (b, h, r))
    return pl.pallas_call(
        partial(join_kernel, sizes=(X, D)),
        grid=(R, H, B),
        in_specs=[
            pl.BlockSpec((None, None, Xp, None, Dp), lambda r, h, b: (b, h, 0, r, 0)),
            pl.BlockSpec((None, None, Xp, None), lambda r, h, b: (b, h, 0, r)),
        ],
        out_specs=[pl.BlockSpec((None, None, None, Dp), lambda r, h, b: (b, h, r, 0)), row],
        out_shape=[jax.ShapeDtypeStruct((B, H, R, D), dtype), jax.ShapeDtypeStruct((B, H, R), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(out, lse)


def join_kernel(out_ref: Any, lse_ref: Any, joined_ref: Any, joined_lse_ref: Any, *, sizes: Sequence[int]) -> None:
    X, D = sizes
    Xp, Dp = out_ref.shape
    part, channel = jnp.arange(Xp) < X, jnp.arange(Dp) < D
    lse = plgpu.load(lse_ref, mask=part, other=-jnp.inf)
    out = plgpu.load(out_ref, mask=part[:, None] & channel[None], other=0)
    peak = jnp.max(lse)
    shares = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(shares)
    total = jnp.where(total == 0, 1.0, total)
    joined = jnp.sum(out * (shares / total)[:, None], axis=0)
    plgpu.store(joined_ref, joined.astype(joined_ref.dtype), mask=channel)
    joined_lse_ref[()] = peak + jnp.log(total)


def attend_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    t_ref: Any,
    p_ref: Any,
    used_ref: Any,
    start_ref: Any,
    span_ref: Any,
    bias_ref: Any,
    asked_refs: Any,
    found: dict[str, Any],
    *,
    blocks: Blocks,
    splits: int,
    sizes: Sequence[int],
    scale: float,
    window: int | None,
    ragged: bool,
    joins: Joins | None,
) -> None:
    R, W, D = sizes
    Dp = q_ref.shape[-1]
    s, i = pl.program_id(0), pl.program_id(1)
    row = i * blocks.rows + jnp.arange(blocks.rows)
    held_row = (row < R)[:, None]
    of_keys = channels(parts(k_ref), D, Dp)
    q = [plgpu.load(q_ref.at[:, c], mask=held_row & mask, other=0) for c, mask in of_keys]
    t = plgpu.load(t_ref.at[jax.lax.rem(row, W)], mask=row < R, other=-1)
    newest, besides = jnp.max(t), []
    if joins is not None:  # kept for all tiles of slots
        for begin in range(0, asked_refs.lse.shape[0], joins.size):
            rows = pl.ds(begin, joins.size)
            queries = [plgpu.load(asked_refs.queries.at[rows, c], mask=mask, other=0) for c, mask in of_keys]
            besides.append((queries, asked_refs.lse[rows], asked_refs.positions[rows]))
            newest = jnp.maximum(newest, jnp.max(besides[-1][2]))
    used = jnp.where(newest >= 0, used_ref[()], 0)
    start = 0 if start_ref is None else start_ref[()]
    last = jax.lax.div(used + blocks.slots - 1, blocks.slots)
    first = 0 if span_ref is None else span_ref[i, 0]
    tiles = (last if span_ref is None else jnp.minimum(last, span_ref[i, 1])) - first

    def load(ref: Any, place: Any, held: Array, c: Any = slice(None)) -> Array:
        if not ragged and Dp == D:
            return ref[place, c]
        x = ref.at[place, c]
        return plgpu.load(x, mask=held[:, None] & (jnp.arange(x.shape[-1]) < D)[None], other=0)

    def numbers(ref: Any, place: Any, held: Array) -> list[Array]:
        """Of keys or values: one of all channels, or one of each half."""
        if not isinstance(ref, QuantizedArray):
            return [load(ref, place, held)]
        codes = load(ref.codes, place, held)
        if ref.bits == 8:
            return [dequantized(codes, load(ref.scales, place, held), ref.dtype)]
        groups = ref.scales.shape[-1]
        halves = [slice(None)] * 2 if groups == 1 else [pl.ds(0, groups // 2), pl.ds(groups // 2, groups // 2)]
        low, high = (load(ref.scales, place, held, half) for half in halves)
        return [dequantized((codes << 4) >> 4, low, ref.dtype), dequantized(codes >> 4, high, ref.dtype)]

    def add(j: Array, running: tuple[list[Array], Array, Array]) -> tuple[list[Array], Array, Array]:
        out, total, peak = running
        slot = j * blocks.slots + jnp.arange(blocks.slots)
        held = slot < used
        place = pl.ds(start + j * blocks.slots, blocks.slots)
        p = plgpu.load(p_ref.at[place], mask=held, other=-1)[None]
        keys = numbers(k_ref, place, held)
        bias = None if bias_ref is None else plgpu.load(bias_ref.at[place], mask=held, other=0)[None]

        def logits_of(q: list[Array], t: Array) -> Array:
            logits = sum(product(x, y.T) for x, y in zip(q, keys, strict=True)) * scale
            if bias is not None:
                logits += bias
            seen = (p >= 0) & (p <= t[:, None])
            if window is not None:
                seen &= t[:, None] - p < window
            return jnp.where(seen, logits, -jnp.inf)

        logits = logits_of(q, t)
        if "logits" in found:
            rows = pl.ds(i * blocks.rows, blocks.rows)
            plgpu.store(found["logits"].at[rows, place], logits, mask=(row < R)[:, None] & held[None])
        if joins is not None:
            join = jnp.maximum if joins.tiles == "max" else jnp.add
            scores = reduce(join, [jnp.exp(logits_of(queries, at) - lse[:, None]) for queries, lse, at in besides])
            scores = jnp.max(scores, axis=0) if joins.rows == "max" else jnp.sum(scores, axis=0)
            plgpu.store(found["scores"].at[place], scores, mask=held)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        finite = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights = jnp.exp(logits - finite[:, None])
        shrink = jnp.exp(peak - finite)
        if v_ref is not None:
            values = numbers(v_ref, place, held)
            out = [x * shrink[:, None] + product(weights.astype(y.dtype), y) for x, y in zip(out, values, strict=True)]
        return out, total * shrink + jnp.sum(weights, axis=1), higher

    nothing = jnp.zeros(blocks.rows, jnp.float32)
    shares = [] if v_ref is None else channels(parts(v_ref), D, Dp)
    out = [jnp.zeros((blocks.rows, Dp // len(shares)), jnp.float32) for _ in shares]
    first, last = first + jax.lax.div(tiles * s, splits), first + jax.lax.div(tiles * (s + 1), splits)
    out, total, peak = jax.lax.fori_loop(first, last, add, (out, nothing, nothing - jnp.inf))
    total = jnp.where(total == 0, 1.0, total)
    plgpu.store(found["lse"], peak + jnp.log(total), mask=row < R)
    for x, (c, mask) in zip(out, shares, strict=True):
        context = (x / total[:, None]).astype(found["out"].dtype)
        plgpu.store(found["out"].at[:, c], context, mask=held_row & mask)


def channels(parts: int, D: int, Dp: int) -> list[tuple[Any, Bool[Array, "1 Dp/parts"]]]:
    """Where each part of the channels lies, and which of it are there; Dp is D unless there is but one."""
    n = Dp // parts
    return [(slice(None) if parts == 1 else pl.ds(i * n, n), (i * n + jnp.arange(n) < D)[None]) for i in range(parts)]
