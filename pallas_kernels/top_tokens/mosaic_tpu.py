"""Exact top-k on TPUs (Mosaic): counting passes over scores that stay on the chip, and compaction by matrix products.

A TPU's core cannot scatter, so each place of the result looks its entry up. Running counts of marks tell which row of
128 marks holds the entry, and then which mark of that row. Marks and counts up to 128 are exact in bfloat16, and their
sums are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..mosaic_tpu.common import LANES, SUBLANES, Interpret, compiler_params, product, round_up

TOP_VMEM_BYTES = 48 << 20  # more than other kernels take, for long rows of scores
LOWEST = jnp.iinfo(jnp.int32).min
HIGHEST = jnp.iinfo(jnp.int32).max
MARK_ROWS = 128  # rows of LANES marks that are compacted at a time
CHUNK = 64  # rows per step of a counting pass
HEADS_BYTES = 1 << 20  # scores of the heads that one program counts


def top_tokens(
    scores: Float[Array, "B H M"],
    positions: Int[Array, "B H M"],
    counts: Int[Array, "B H"],
    *,
    size: int,
    interpret: Interpret = False,
) -> Int[Array, "B H size"]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for more scores and tokens than fit the chip's memory.
    """
    B, H, M = scores.shape
    rows = round_up(-(-M // LANES), 2 * SUBLANES)
    rows = rows if rows <= MARK_ROWS else round_up(rows, MARK_ROWS)
    result_rows = round_up(-(-size // LANES), SUBLANES)
    heads = next(
        n for n in range(SUBLANES, 0, -1) if B * H % n == 0 and (n == 1 or n * rows * LANES * 4 <= HEADS_BYTES)
    )
    nbytes, most = heads * LANES * (rows * (4 + 2 + 2 * 8) + result_rows * 8), TOP_VMEM_BYTES * 3 // 4
    if nbytes > most:
        raise NotImplementedError(f"{M} scores and size {size}, {nbytes:,} bytes: expected at most {most:,} bytes")

    def flat(x: Array, missing: float) -> Array:
        return pad(x, rows * LANES - M, axis=2, value=missing).reshape(B * H, rows, LANES)

    block = pl.BlockSpec((heads, rows, LANES), lambda n, *_: (n, 0, 0))
    chosen = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * H // heads,),
            in_specs=[block, block],
            out_specs=pl.BlockSpec((heads, result_rows, LANES), lambda n, *_: (n, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((heads, rows, LANES), jnp.int32),
                pltpu.VMEM((heads, rows, LANES), jnp.bfloat16),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B * H, result_rows, LANES), jnp.int32),
        compiler_params=compiler_params("parallel", vmem=TOP_VMEM_BYTES),
        interpret=interpret,
        name="top_tokens",
    )(
        counts.astype(jnp.int32).reshape(-1),
        flat(scores.astype(jnp.float32), -jnp.inf),
        flat(positions.astype(jnp.int32), -1),
    )
    return chosen.reshape(B, H, result_rows * LANES)[..., :size]


def _kernel(counts: Any, scores: Any, positions: Any, out: Any, order: Any, marks: Any) -> None:
    """Writes the result of some heads. `order` and `marks` are scratch memory."""
    heads, rows, _ = order.shape
    chunk = CHUNK if rows % CHUNK == 0 else rows

    def each_chunk(act: Callable[[Any, Any], Any], carry: Any) -> Any:
        def step(c: Array, carry: Any) -> Any:
            return act((slice(None), pl.ds(pl.multiple_of(c * chunk, chunk), chunk)), carry)

        return jax.lax.fori_loop(0, rows // chunk, step, carry)

    def count(test: Callable[[Any], Array]) -> Int[Array, "heads 1 1"]:
        def add(place: Any, total: Array) -> Array:
            return total + jnp.sum(test(place).astype(jnp.int32).reshape(heads, -1, SUBLANES, LANES), axis=1)

        total = each_chunk(add, jnp.zeros((heads, SUBLANES, LANES), jnp.int32))
        return jnp.sum(total, axis=(1, 2), keepdims=True)

    def kth_largest(values: Callable[[Any], Array], k: Array, bits: Array | int) -> Int[Array, "heads 1 1"]:
        """Does what `xla._kth_largest` does for signed integers: the first bit of its unsigned integers is flipped."""

        def decide(i: Array, found: Array) -> Array:
            candidate = found | jnp.left_shift(1, 31 - i)
            enough = count(lambda place: values(place) >= candidate ^ LOWEST) >= k
            return jnp.where(enough, candidate, found)

        return jax.lax.fori_loop(0, bits, decide, jnp.zeros((heads, 1, 1), jnp.int32)) ^ LOWEST

    def rank(place: Any, _: None) -> None:
        """Stores signed integers in the order of the floats. -0.0 equals 0.0; -inf gives the lowest integer."""
        x = scores[place]
        bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
        bits = jnp.where(bits < 0, bits ^ HIGHEST, bits)
        order[place] = jnp.where(x > -jnp.inf, bits, LOWEST)

    each_chunk(rank, None)
    first = pl.program_id(0) * heads
    index = jax.lax.broadcasted_iota(jnp.int32, (heads, 1, 1), 0)
    wanted = jnp.zeros((heads, 1, 1), jnp.int32)
    for h in range(heads):
        wanted = jnp.where(index == h, counts[first + h], wanted)
    wanted = jnp.minimum(wanted, count(lambda place: order[place] > LOWEST))
    threshold = kth_largest(lambda place: order[place], wanted, 32)

    def earliness(place: Any) -> Array:
        tied = (order[place] == threshold) & (order[place] > LOWEST)
        return jnp.where(tied, HIGHEST - positions[place], LOWEST)

    missing = wanted - count(lambda place: order[place] > threshold)
    tied = count(lambda place: earliness(place) > LOWEST)
    # If all tied entries are wanted, which includes the case of no ties, no positions are compared.
    undecided = jnp.max((tied > missing).astype(jnp.int32))
    cut = kth_largest(earliness, missing, 32 * undecided)

    def mark(place: Any, _: None) -> None:
        early = earliness(place)
        chosen = (order[place] > threshold) | ((early > LOWEST) & (missing > 0) & (early >= cut))
        marks[place] = jnp.where(chosen, 1.0, 0.0).astype(marks.dtype)

    each_chunk(mark, None)
    jax.lax.fori_loop(0, heads, lambda h, _: _compact(marks.at[h], out.at[h]), None)


def _compact(marks: Any, out: Any) -> None:
    """Writes the indices of the marks that are 1, ascending, then -1."""
    rows = min(MARK_ROWS, marks.shape[0])
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    row, other = (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), axis) for axis in (0, 1))
    before = (other < row).astype(jnp.bfloat16)
    lane, other = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    until = (other <= lane).astype(jnp.bfloat16)
    target = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    numbers = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0).astype(jnp.float32)
    out[...] = jnp.full(out.shape, -1, jnp.int32)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=0, keepdims=True)

    def add_block(b: Array, seen: Array) -> Array:
        """Fills places from `seen` on with the marks of a block of rows, a line of LANES places at a time."""
        bits = marks[pl.ds(pl.multiple_of(b * rows, rows), rows)]
        row_marks = product(bits, ones, (1, 0))  # the number of marks of each row, the same in every vector lane
        begin = product(before, row_marks.astype(jnp.bfloat16), (1, 0))
        count = jnp.max(begin + row_marks).astype(jnp.int32)

        def fill(line: Array, _: None) -> None:
            wanted = (line * LANES + target - seen).astype(jnp.float32)
            mine = (begin <= wanted) & (wanted < begin + row_marks)  # [row, place], at most one row per place
            picked = product(bits, jnp.where(mine, 1.0, 0.0).astype(jnp.bfloat16), (0, 0))  # [vector lane, place]
            place = total(jnp.where(mine, wanted - begin, 0.0))
            upto = product(until, picked.astype(jnp.bfloat16), (1, 0))
            lanes = total(jnp.where(upto <= place, 1.0, 0.0))
            index = (total(jnp.where(mine, numbers, 0.0)) * LANES + lanes).astype(jnp.int32) + b * rows * LANES
            hit = total(jnp.where(mine, 1.0, 0.0)) > 0
            out[pl.ds(line, 1)] = jnp.where(hit, index, out[pl.ds(line, 1)])

        last = jnp.minimum(jax.lax.div(seen + count + LANES - 1, LANES), out.shape[0])
        jax.lax.fori_loop(jax.lax.div(seen, LANES), last, fill, None)
        return seen + count

    jax.lax.fori_loop(0, marks.shape[0] // rows, add_block, jnp.int32(0))
