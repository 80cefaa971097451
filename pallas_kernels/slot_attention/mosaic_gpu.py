"""Slot attention on GPUs since Hopper (Pallas, Mosaic GPU): for decode steps, and tried only if it is asked for.

A program takes all query rows of a kv head and walks over a part of its slots with a running softmax (FlashAttention,
arXiv 2205.14135). The tensor memory accelerator (TMA) copies keys, values and positions of the next tiles to shared
memory meanwhile. The programs of a head are joined by their log-sum-exps.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..arrays import Fold, after_last, check_channels, fold, pad
from ..mosaic_gpu.common import Products, capability, interpreted, over, product, products_for
from ..quantized import QuantizedArray
from ..softmax import finite_or_zero
from .asked import Asked
from .reference import SlotAttention

TILE_ELEMENTS = 8 << 10  # of a tile of keys: 32 KiB of keys and values in 16 bits
STAGES = 2  # tiles in shared memory; two programs of a core have four in flight
PROGRAMS = 264  # programs that a GPU should run at a time: two per core of an H100
LEAST_TILES = 2  # tiles per program, if programs share them
MOST_SPLITS = 64  # programs that share the tiles of a head
MOST_ROWS = 64  # query rows per program
MOST_SUMS = 64 * 128  # numbers of a program's context: more would need more registers than there are
LOG2E = math.log2(math.e)
CHANNELS = 64  # channels of a product with values: more would need more registers for the sum of the products so far


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
    interpret: bool = False,
) -> SlotAttention:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for `received` and `asked`; for quantised keys and values; for values with another number
            of channels than keys; for dtypes that differ or are neither bfloat16 nor float16; for a D that is no
            multiple of 32 or above 256; for an S that is no multiple of 8; for more query rows per kv head than
            MOST_ROWS, or than MOST_SUMS allows; for a GPU before Hopper, and for Blackwell under a JAX before 0.11.
    """
    B, Hq, W, D = q.shape
    H = k.shape[1]
    check_channels(k, v)
    check(q, k, v, rows=Hq // H * W, others=received is not None or asked is not None)
    arrays: Any = k, v, q_positions, k_positions
    products = "lax" if interpret else products_for(Hq // H * W, capability())
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    out, lse = attend(q.reshape(B, H, -1, D), *arrays, products=products, **options)
    return SlotAttention(out.reshape(q.shape), lse.reshape(B, Hq, W), None, None)


def check(q: Any, k: Any, v: Any, *, rows: int, others: bool) -> None:
    """Raises NotImplementedError for arguments that the kernel does not take.

    Args:
        rows: query rows per kv head.
        others: whether more is asked for than the context and the log-sum-exp.
    """
    if others:
        raise NotImplementedError("what slots receive or earlier queries are asked: expected neither")
    for x in (k, v):
        if not isinstance(x, jax.Array | np.ndarray):
            raise NotImplementedError(f"keys and values of type {type(x).__name__}: expected plain arrays")
    kinds = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float16"}:
        raise NotImplementedError(f"dtypes {', '.join(sorted(kinds))}: expected one of bfloat16 and float16")
    if q.shape[-1] % 32 != 0 or q.shape[-1] > 256:
        raise NotImplementedError(f"heads of {q.shape[-1]} channels: expected a multiple of 32, at most 256")
    if k.shape[2] % 8 != 0:  # TMA copies 8 rows at a time
        raise NotImplementedError(f"{k.shape[2]} slots: expected a multiple of 8")
    if rows > MOST_ROWS:
        raise NotImplementedError(f"{rows} query rows per kv head: expected at most {MOST_ROWS}")


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
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H S"] | None = None,
    products: Products,
    tile: int | None = None,
    splits: int | None = None,
) -> tuple[Float[Array, "B H R D"], Float[Array, "B H R"]]:
    """The context, and the log-sum-exp of R = G W rows. Row r is a query at position q_positions[:, r mod W].

    Args:
        products: what multiplies matrices; see `Products`.
        tile: slots per tile, a multiple of 32; `tile_slots` if None.
        splits: programs per kv head; `splits_of` if None.
    """
    B, H, R, D = q.shape
    S = k.shape[2]
    tile = tile or tile_slots(D)
    splits = splits or splits_of(B * H, S, tile)
    rows = MOST_ROWS if products == "wgmma" else max(16, pl.next_power_of_2(R))
    if rows * D > MOST_SUMS:
        raise NotImplementedError(
            f"{R} query rows of {D} channels, as {rows} rows: expected at most {MOST_SUMS} numbers"
        )
    width = min(CHANNELS, D)
    out_dtype = q.dtype if splits == 1 else jnp.float32
    written = R + -R % 8  # TMA copies whole tiles of 8 rows, and multiples of 16 bytes
    t, p = q_positions.astype(jnp.int32), pad(k_positions.astype(jnp.int32), -S % tile, 2, -1)
    one = t.shape[1] == 1  # all rows have the position that a program reads as a number
    if not one:
        t = pad(jnp.tile(t, (1, R // t.shape[1])), rows - R, 1, -1)
    arrays = [pad(q, written - R, 2), k, v, t, p, jnp.max(t, axis=1), after_last(p >= 0)]
    if bias is not None:
        arrays.append(pad(bias.astype(jnp.float32), -S % tile, 2))
    per_slot = [jnp.int32] if bias is None else [jnp.int32, jnp.float32]
    sizes: dict[str, Any] = {
        "splits": splits,
        "scale": scale * LOG2E,
        "window": window,
        "softcap": softcap,
        "width": width,
    }
    scratch: dict[str, Any] = {
        "q_tile": plgpu.SMEM((rows, D), q.dtype),
        "t_tile": None if one else plgpu.SMEM((rows,), jnp.int32),
        "k_tiles": plgpu.SMEM((STAGES, tile, D), k.dtype),
        "v_tiles": plgpu.SMEM((STAGES, tile, D), v.dtype),
        "slot_tiles": [plgpu.SMEM((STAGES, tile), dtype) for dtype in per_slot],
        "weights_tile": None if products == "wgmma" else plgpu.SMEM((rows, tile), v.dtype),
        "out_tile": plgpu.SMEM((rows, width), out_dtype),
        "lse_tile": plgpu.SMEM((rows,), jnp.float32),
        "q_here": plgpu.Barrier(num_arrivals=1 if one else 2),
        "k_here": plgpu.Barrier(num_arrivals=1 + len(per_slot), num_barriers=STAGES),
        "v_here": plgpu.Barrier(num_barriers=STAGES),
    }
    out, lse = plgpu.kernel(
        partial(attend_kernel, products=products, **sizes),
        out_type=[
            jax.ShapeDtypeStruct((B, H, splits, written, D), out_dtype),
            jax.ShapeDtypeStruct((B, H, splits, written), jnp.float32),
        ],
        grid=(splits, H, B),
        grid_names=("split", "head", "batch"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpreted(ragged=S % tile != 0) if products == "lax" else None,
        kernel_name="mosaic_gpu_attend",
    )(*arrays)
    return join(out[:, :, :, :R], lse[:, :, :, :R], q.dtype)


def attend_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    t_ref: Any,
    p_ref: Any,
    newest_ref: Any,
    used_ref: Any,
    *more_refs: Any,
    products: Products,
    splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    width: int,
    q_tile: Any,
    t_tile: Any,
    k_tiles: Any,
    v_tiles: Any,
    slot_tiles: list[Any],
    weights_tile: Any,
    out_tile: Any,
    lse_tile: Any,
    q_here: Any,
    k_here: Any,
    v_here: Any,
) -> None:
    """Writes the context and the log-sum-exp of one kv head's rows over its part of the tiles.

    Rows of `q_tile` beyond those that are written hold anything. They see no slot.

    Args:
        newest_ref: the largest position of a batch row's queries.
        more_refs: the bias, if there is one; the context; the log-sum-exp.
        scale: of the logits to base 2.
        width: channels per product with values.
        q_here, k_here, v_here: barriers of the copies.
    """
    *bias_refs, out_ref, lse_ref = more_refs
    s, h, b = (jax.lax.axis_index(name) for name in ("split", "head", "batch"))
    (rows, D), tile = q_tile.shape, k_tiles.shape[1]
    written = q_ref.shape[2]
    parts: list[Any] = [pl.ds(c, min(width, D - c)) for c in range(0, D, width)]
    used = jnp.where(newest_ref[b] >= 0, used_ref[b, h], 0)
    tiles = jax.lax.div(used + (tile - 1), tile)
    first, last = jax.lax.div(tiles * s, splits), jax.lax.div(tiles * (s + 1), splits)

    def fetch(j: Any) -> None:
        stage, place = jax.lax.rem(j, STAGES), pl.ds(j * tile, tile)
        plgpu.copy_gmem_to_smem(k_ref.at[b, h, place], k_tiles.at[stage], k_here.at[stage])
        for ref, tiles_of in zip((p_ref, *bias_refs), slot_tiles, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[b, h, place], tiles_of.at[stage], k_here.at[stage])
        plgpu.copy_gmem_to_smem(v_ref.at[b, h, place], v_tiles.at[stage], v_here.at[stage])

    plgpu.copy_gmem_to_smem(q_ref.at[b, h], q_tile.at[pl.ds(0, written)], q_here)
    if t_tile is not None:
        plgpu.copy_gmem_to_smem(t_ref.at[b], t_tile, q_here)
    for i in range(STAGES):
        pl.when(first + i < last)(partial(fetch, first + i))
    plgpu.barrier_wait(q_here)
    t = t_ref[b, 0] if t_tile is None else over(t_tile[...], (rows, tile), 0)

    def add(j: Array, running: tuple[list[Array], Array, Array]) -> tuple[list[Array], Array, Array]:
        """Adds tile j to the running softmax, whose exponentials have base 2."""
        out, total, peak = running
        stage = jax.lax.rem(j, STAGES)
        plgpu.barrier_wait(k_here.at[stage])
        logits = product(q_tile, k_tiles.at[stage], products, transposed=True) * scale
        # softcap * tanh(logit / softcap) by an exponential; the hardware's tanh is less accurate
        if softcap is not None:
            logits = softcap * LOG2E * (1 - 2 / (jnp.exp2(logits * (2 / softcap)) + 1))
        p, *bias = (over(x[stage], (rows, tile), 1) for x in slot_tiles)
        for x in bias:
            logits += x * LOG2E
        seen = (p >= 0) & (p <= t)
        if window is not None:
            seen &= t - p < window
        logits = jnp.where(seen, logits, -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        finite = finite_or_zero(higher)
        weights = jnp.exp2(logits - over(finite, (rows, tile), 0))
        shrink = jnp.exp2(peak - finite)
        total = total * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(v_tiles.dtype)
        if weights_tile is not None:  # a warp computed the weights of some slots, and needs those of all
            weights_tile[...] = weights
            weights = weights_tile
        plgpu.barrier_wait(v_here.at[stage])
        out = [
            x * over(shrink, x.shape, 0) + product(weights, v_tiles.at[stage, :, part], products)
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
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, written), place], out_ref.at[b, h, s, :, part])
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(lse_tile.at[pl.ds(0, written)], lse_ref.at[b, h, s])
    plgpu.wait_smem_to_gmem(0)


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
