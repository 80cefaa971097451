"""Overwrites of one entry per kv head on TPUs (Mosaic), where entries lie along vector lanes.

XLA's scatter wants the channels of an entry along vector lanes. A decode step of entries that do not fill them would
turn all keys and values around for the scatter, and back for the attention. This kernel fetches the 128 entries around
each row that is written, changes one, and writes them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem
from jaxtyping import Array, Int

from ..arrays import pad
from ..mosaic_tpu.common import LANES, Interpret, compiler_params, in_place, stored_transposed
from . import reference

BUFFER_BYTES = 8 << 20  # of on-chip memory for the entries around the rows that are written together


def write_rows(stored: Any, row: Int[Array, "B H"], new: Any, *, interpret: Interpret = False) -> Any:
    """Does what the reference defines. Entries that fill vector lanes, or are a few numbers, are scattered."""
    pairs = list(zip(jax.tree.leaves(stored), jax.tree.leaves(new), strict=True))
    own = [_lies_along_lanes(x, row.shape[1]) for x, _ in pairs]

    def written(by: Any, mine: bool) -> Iterator[Array]:
        """Writes to the arrays that are this kernel's, or to the others."""
        chosen = [pair for pair, here in zip(pairs, own, strict=True) if here is mine]
        return iter(by([x for x, _ in chosen], row, [y for _, y in chosen]) if chosen else ())

    parts = {True: written(partial(_write, interpret=interpret), True), False: written(reference.write_rows, False)}
    return jax.tree.unflatten(jax.tree.structure(stored), [next(parts[here]) for here in own])


def _lies_along_lanes(x: Array, heads: int) -> bool:
    return (
        stored_transposed(x.shape[-1])
        and x.shape[-1] > reference.SINGLY
        and x.dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
        and heads // x.shape[1] <= LANES
    )


def _write(arrays: list[Array], row: Int[Array, "B H"], new: list[Array], interpret: Interpret) -> list[Array]:
    """Writes to arrays [B, P, T, C] with the same P and T."""
    (B, H), (P, T) = row.shape, arrays[0].shape[1:3]
    J, width = H // P, min(LANES, T)
    around = sum(x.shape[-1] * x.dtype.itemsize for x in arrays) * width
    lanes = min(B * P, LANES // J, max(BUFFER_BYTES // around, 1))  # of the pool, for each step of the grid
    heads = lanes * J
    missing = -(B * H) % heads
    steps = (B * H + missing) // heads
    flat = pad(row.astype(jnp.int32).reshape(-1), missing, axis=0, value=T)
    columns = [
        pad(
            jnp.swapaxes(pad(y.reshape(B * H, -1), missing, axis=0).reshape(steps, heads, -1), 1, 2),
            LANES - heads,
            axis=2,
        )
        for y in new
    ]
    turned = [jnp.swapaxes(x, 2, 3).reshape(B * P, -1, T) for x in arrays]
    # A TPU's memory has room for whole blocks of 128 entries; an interpreted array has not.
    turned = [pad(x, -T % width, axis=2) if interpret else in_place(x, interpret) for x in turned]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        partial(_kernel, T=T, width=width, lanes=lanes, lane_heads=J, count=len(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                *(pl.BlockSpec((None, *y.shape[1:]), lambda g, *_: (g, 0, 0)) for y in columns),
                *[anywhere] * len(arrays),
            ],
            out_specs=[anywhere] * len(arrays),
            scratch_shapes=[
                *(pltpu.VMEM((lanes, x.shape[1], width), x.dtype) for x in turned),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in turned],
        input_output_aliases={1 + len(arrays) + i: i for i in range(len(arrays))},
        compiler_params=compiler_params("arbitrary"),
        interpret=interpret,
        name="write_rows",
    )(flat, *(y.astype(jnp.float32) for y in columns), *turned)
    return [jnp.swapaxes(x[..., :T].reshape(B, P, -1, T), 2, 3) for x in written]


def _kernel(row: Any, *refs: Any, T: int, width: int, lanes: int, lane_heads: int, count: int) -> None:
    """Writes the rows of `lanes` lanes: one head of each lane after another, as they may have neighbouring rows.

    Args:
        row: of each head.
        refs: the new entries as columns, the arrays twice, buffers, and semaphores to fetch and to write back.
    """
    columns, arrays, buffers = refs[:count], refs[2 * count : 3 * count], refs[3 * count : 4 * count]
    semaphores, step = refs[4 * count], pl.program_id(0)

    def each(head_of_lane: int, do: Any) -> None:
        """Calls do(lane, head, row) for one head of each lane. Heads are counted within the step."""

        def one(lane: Array, _: None) -> None:
            head = lane * lane_heads + head_of_lane
            at = row[step * lanes * lane_heads + head]
            pl.when(at < T)(lambda: do(lane, head, at))

        jax.lax.fori_loop(0, lanes, one, None)

    def copies(lane: Array, at: Array, back: bool) -> list[Any]:
        """The copies of the entries around a row to the buffers, or back."""
        first = pl.multiple_of(div(at, width) * width, width)
        found = []
        for x, buffer in zip(arrays, buffers, strict=True):
            there, here = x.at[step * lanes + lane, :, pl.ds(first, width)], buffer.at[lane]
            source, target = (here, there) if back else (there, here)
            found.append(pltpu.make_async_copy(source, target, semaphores.at[int(back)]))
        return found

    def begin(back: bool, lane: Array, _: Array, at: Array) -> None:
        for copy in copies(lane, at, back):
            copy.start()

    def wait(back: bool, lane: Array, _: Array, at: Array) -> None:
        for copy in copies(lane, at, back):
            copy.wait()

    def change(lane: Array, head: Array, at: Array) -> None:
        place = rem(at, width)
        index = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        for new, buffer in zip(columns, buffers, strict=True):
            moved = pltpu.roll(new[...], rem(place - head + LANES, LANES), 1)[:, :width]
            buffer[lane] = jnp.where(index == place, moved, buffer[lane].astype(jnp.float32)).astype(buffer.dtype)

    for head_of_lane in range(lane_heads):
        each(head_of_lane, partial(begin, False))
        each(head_of_lane, partial(wait, False))
        each(head_of_lane, change)
        each(head_of_lane, partial(begin, True))
        each(head_of_lane, partial(wait, True))
