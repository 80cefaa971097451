"""The body of the Triton attention kernel: one block of query rows, over one head's part of the tiles of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from ..quantized import QuantizedArray
from ..slot_attention.asked import ExtraReduction
from ..softmax import capped, finite_or_zero
from .blocks import Blocks, power_of_two
from .codes import IntegerRows, context_of, copies, groups_of, weighted_codes
from .common import channel_slices, dequantize_tile, product, tiles_per_number

SCANNED = 256  # positions that a program reads at once to find its last occupied tile; more spill registers


def attend_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    t_ref: Any,
    p_ref: Any,
    used_ref: Any,
    start_ref: Any,
    spans_ref: Any,
    bias_ref: Any,
    extra_refs: Any,
    results: dict[str, Any],
    *,
    blocks: Blocks,
    splits: int,
    sizes: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    ragged: bool,
    extra_reduction: ExtraReduction | None,
    multiplies_codes: bool,
) -> None:
    """Writes lse, and of out, logits and scores those that `results` has; see `triton_attention.attend`.

    Args:
        sizes: R, W, D and Dv, the channels of a value.
        ragged: whether a tile may reach beyond the slots of its lane.
        multiplies_codes: whether codes are multiplied as they are; see `codes.py`. There are no extra rows then.
    """
    R, W, D, Dv = sizes
    Dp, Dvp = q_ref.shape[-1], power_of_two(Dv)
    s, i = pl.program_id(0), pl.program_id(1)
    start = 0 if start_ref is None else start_ref[()]
    first = 0 if spans_ref is None else spans_ref[i, 0]
    if used_ref is None:
        used, own = p_ref.shape[0], occupied_tiles(p_ref, blocks.slots, s, splits)
    else:
        used = used_ref[()]
        last = jax.lax.div(used + blocks.slots - 1, blocks.slots)
        tiles = (last if spans_ref is None else jnp.minimum(last, spans_ref[i, 1])) - first
        own = jax.lax.div(tiles + splits - 1 - s, splits)
    row = i * blocks.rows + jnp.arange(blocks.rows)
    row_exists = (row < R)[:, None]
    key_slices = channel_slices(tiles_per_number(k_ref), D, Dp)
    q = [plgpu.load(q_ref.at[:, c], mask=row_exists & mask, other=0) for c, mask in key_slices]
    t = plgpu.load(t_ref.at[jax.lax.rem(row, W)], mask=row < R, other=-1)
    newest, extra = jnp.max(t), []
    if extra_reduction is not None:  # loaded once, for all tiles of slots
        for begin in range(0, extra_refs.lse.shape[0], extra_reduction.size):
            rows = pl.ds(begin, extra_reduction.size)
            queries = [plgpu.load(extra_refs.queries.at[rows, c], mask=mask, other=0) for c, mask in key_slices]
            extra.append((queries, extra_refs.lse[rows], extra_refs.positions[rows]))
            newest = jnp.maximum(newest, jnp.max(extra[-1][2]))
    own = jnp.where(newest >= 0, own, 0)
    groups = groups_of(k_ref) if multiplies_codes else 1
    integers = IntegerRows.of(q, k_ref) if multiplies_codes else None

    def load(ref: Any, size: int, place: Any, occupied: Array, c: Any = slice(None)) -> Array:
        """A tile of some channels of `ref`, which has the numbers of `size` channels."""
        if not ragged and power_of_two(size) == size:
            return ref[place, c]
        x = ref.at[place, c]
        return plgpu.load(x, mask=occupied[:, None] & (jnp.arange(x.shape[-1]) < size)[None], other=0)

    def load_codes(ref: QuantizedArray, size: int, place: Any, occupied: Array) -> QuantizedArray:
        codes, scales = (load(x, size, place, occupied) for x in (ref.codes, ref.scales))
        return replace(ref, codes=codes, scales=scales)

    def load_numbers(ref: Any, size: int, place: Any, occupied: Array) -> list[Array]:
        """A tile of keys or values: one array of all channels, or one for each half of the channels."""
        if not isinstance(ref, QuantizedArray):
            return [load(ref, size, place, occupied)]
        codes = load(ref.codes, size, place, occupied)
        if ref.bits == 8:
            return [dequantize_tile(codes, load(ref.scales, size, place, occupied), ref.dtype)]
        groups = ref.scales.shape[-1]
        halves = [slice(None)] * 2 if groups == 1 else [pl.ds(0, groups // 2), pl.ds(groups // 2, groups // 2)]
        low, high = (load(ref.scales, size, place, occupied, half) for half in halves)
        return [dequantize_tile((codes << 4) >> 4, low, ref.dtype), dequantize_tile(codes >> 4, high, ref.dtype)]

    def add(n: Array, running: tuple[list[Array], Array, Array]) -> tuple[list[Array], Array, Array]:
        """Adds this program's tile n to the running softmax."""
        out, total, peak = running
        j = first + s + n * splits
        slot = j * blocks.slots + jnp.arange(blocks.slots)
        occupied = slot < used
        place = pl.ds(start + j * blocks.slots, blocks.slots)
        p = plgpu.load(p_ref.at[place], mask=occupied, other=-1)[None]
        keys: Any = (load_codes if multiplies_codes else load_numbers)(k_ref, D, place, occupied)
        bias = None if bias_ref is None else plgpu.load(bias_ref.at[place], mask=occupied, other=0)[None]

        def products_of(q: list[Array]) -> Array:
            return reduce(jnp.add, [product(x, y.T) for x, y in zip(q, keys, strict=True)])

        def logits_of(products: Array, t: Array) -> Array:
            logits = capped(products * scale, softcap)
            if bias is not None:
                logits += bias
            seen = (p >= 0) & (p <= t[:, None])
            if window is not None:
                seen &= t[:, None] - p < window
            return jnp.where(seen, logits, -jnp.inf)

        logits = logits_of(products_of(q) if integers is None else integers.products(keys), t)
        if "logits" in results:
            rows = pl.ds(i * blocks.rows, blocks.rows)
            plgpu.store(results["logits"].at[rows, place], logits, mask=(row < R)[:, None] & occupied[None])
        if extra_reduction is not None:
            join = jnp.maximum if extra_reduction.tiles == "max" else jnp.add
            each = [jnp.exp(logits_of(products_of(queries), at) - lse[:, None]) for queries, lse, at in extra]
            scores = reduce(join, each)
            scores = jnp.max(scores, axis=0) if extra_reduction.rows == "max" else jnp.sum(scores, axis=0)
            plgpu.store(results["scores"].at[place], scores, mask=occupied)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        finite = finite_or_zero(higher)
        weights = jnp.exp(logits - finite[:, None])
        shrink = jnp.exp(peak - finite)
        if v_ref is not None:
            if multiplies_codes:
                sums = weighted_codes(weights, load_codes(v_ref, Dv, place, occupied))
            else:
                sums = [product(weights.astype(y.dtype), y) for y in load_numbers(v_ref, Dv, place, occupied)]
            fading = copies(shrink, groups)[:, None]
            out = [x * fading + y for x, y in zip(out, sums, strict=True)]
        return out, total * shrink + jnp.sum(weights, axis=1), higher

    zeros = jnp.zeros(blocks.rows, jnp.float32)
    value_slices = [] if v_ref is None else channel_slices(tiles_per_number(v_ref), Dv, Dvp)
    out = [jnp.zeros((groups * blocks.rows, Dvp // len(value_slices)), jnp.float32) for _ in value_slices]
    out, total, peak = jax.lax.fori_loop(0, own, add, (out, zeros, zeros - jnp.inf))
    total = jnp.where(total == 0, 1.0, total)
    plgpu.store(results["lse"], peak + jnp.log(total), mask=row < R)
    if multiplies_codes:
        out = context_of(out, v_ref)
    for x, (c, mask) in zip(out, value_slices, strict=True):
        context = (x / total[:, None]).astype(results["out"].dtype)
        plgpu.store(results["out"].at[:, c], context, mask=row_exists & mask)


def occupied_tiles(p_ref: Any, size: int, split: Array, splits: int) -> Array:
    """Returns how many of the tiles `split`, `split + splits`, ... there are up to the last one with an occupied slot.

    Reading a few positions here takes less time than launching a kernel that finds the bound for all programs.

    Args:
        p_ref: the position in each slot of the lane [T].
        size: slots per tile.
    """
    T = p_ref.shape[0]
    tiles = max(1, SCANNED // size)
    number = jnp.arange(tiles * size)

    def look(n: Array, found: Array) -> Array:
        own = n * tiles + jax.lax.div(number, size)
        slot = (own * splits + split) * size + jax.lax.rem(number, size)
        positions = plgpu.load(p_ref.at[slot], mask=slot < T, other=-1)
        return jnp.maximum(found, jnp.max(jnp.where(positions >= 0, own + 1, 0)))

    return jax.lax.fori_loop(0, -(-T // (tiles * size * splits)), look, jnp.int32(0))
