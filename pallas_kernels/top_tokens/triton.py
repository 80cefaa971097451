"""Exact top-k on GPUs (Triton). One program per head finds its k-th largest score and lists the entries above it.

The program finds two bits of that score per pass, in 16 passes. Scores stay in registers if they fit into one tile, and
are read from the L2 cache otherwise. The passes that break ties run only if there are ties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from ..triton.blocks import power_of_two
from ..triton.common import check_device

TILE = 8192  # scores per tile
ROUNDS = 16  # two bits per round
SIGN = np.uint32(1 << 31)


def top_tokens(
    scores: Float[Array, "B H M"],
    positions: Int[Array, "B H M"],
    counts: Int[Array, "B H"],
    *,
    size: int,
    interpret: bool = False,
) -> Int[Array, "B H size"]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for a GPU that is not NVIDIA's or older than the A100.
    """
    check_device()
    B, H, M = scores.shape
    tile = min(power_of_two(M), TILE)

    def head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda h, b: (b, h, *(0,) * len(shape)))

    return pl.pallas_call(
        partial(top_tokens_kernel, tile=tile, entries=M, size=size),
        grid=(H, B),
        in_specs=[head(M), head(M), head()],
        out_specs=head(size),
        out_shape=jax.ShapeDtypeStruct((B, H, size), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(tile // 256, 16)), num_stages=2),
        interpret=interpret,
    )(scores.astype(jnp.float32), positions.astype(jnp.int32), counts.astype(jnp.int32))


def top_tokens_kernel(
    scores_ref: Any, positions_ref: Any, count_ref: Any, index_ref: Any, *, tile: int, entries: int, size: int
) -> None:
    tiles = pl.cdiv(entries, tile)

    def read(j: Array | int) -> tuple[Array, Array]:
        """Reads tile j: scores as unsigned integers in the same order, and larger integers for earlier positions.

        A score of -inf, or none, gives 0.
        """
        place = j * tile + jnp.arange(tile)  # no slice: a static one must not reach beyond the array
        exists = place < entries
        x = plgpu.load(scores_ref.at[place], mask=exists, other=-jnp.inf)
        bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0.0 equals 0.0
        order = jnp.where(bits >= SIGN, ~bits, bits | SIGN)
        p = plgpu.load(positions_ref.at[place], mask=exists, other=0)
        return jnp.where(x > -jnp.inf, order, np.uint32(0)), ~p.astype(jnp.uint32)

    if tiles == 1:
        only = read(0)

    def over_tiles(add: Callable[[Array | int, Array, Array, Any], Any], begin: Any) -> Any:
        """Calls add(j, order, earliness, carry) for each tile j."""
        if tiles == 1:
            return add(0, *only, begin)
        return jax.lax.fori_loop(0, tiles, lambda j, carry: add(j, *read(j), carry), begin)

    def kth_largest(keys: Callable[[Array, Array], Array], k: Array, rounds: Array | int) -> Array:
        """The k-th largest of the unsigned integers keys(order, earliness), by two bits per round; 0 without rounds."""

        def decide(i: Array, found: Array) -> Array:
            shift = np.uint32(30) - 2 * i.astype(jnp.uint32)
            candidates = [found | (np.uint32(digit) << shift) for digit in (1, 2, 3)]

            def count(j: Array | int, order: Array, earliness: Array, counts: list[Array]) -> list[Array]:
                x = keys(order, earliness)
                return [c + (x >= y).astype(jnp.int32) for c, y in zip(counts, candidates, strict=True)]

            counts = over_tiles(count, [jnp.zeros(tile, jnp.int32)] * 3)
            digit = sum((jnp.sum(c) >= k).astype(jnp.uint32) for c in counts)
            return found | (digit << shift)

        return jax.lax.fori_loop(0, rounds, decide, jnp.zeros((), jnp.uint32))

    def tally(j: Array | int, order: Array, earliness: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        above, tied = counts
        return above + (order > threshold).astype(jnp.int32), tied + (order == threshold).astype(jnp.int32)

    def put(j: Array | int, order: Array, earliness: Array, before: Array) -> Array:
        chosen = (order > threshold) | ((order == threshold) & (earliness >= latest))
        chosen = chosen & (order > 0) & (wanted > 0)
        rank = before + jnp.cumsum(chosen.astype(jnp.int32)) - 1
        slot = jnp.where(chosen & (rank < size), rank, size)
        plgpu.store(index_ref.at[slot], j * tile + jnp.arange(tile), mask=slot < size)
        return before + jnp.sum(chosen.astype(jnp.int32))

    zero = jnp.zeros((), jnp.int32)
    eligible = over_tiles(lambda j, order, _, c: c + (order > 0).astype(jnp.int32), jnp.zeros(tile, jnp.int32))
    wanted = jnp.minimum(count_ref[()], jnp.sum(eligible))
    threshold = kth_largest(lambda order, _: order, wanted, ROUNDS)
    above, tied = map(jnp.sum, over_tiles(tally, (jnp.zeros(tile, jnp.int32), jnp.zeros(tile, jnp.int32))))
    missing = wanted - above
    latest = kth_largest(
        lambda order, earliness: jnp.where(order == threshold, earliness, np.uint32(0)),
        missing,
        (missing < tied).astype(jnp.int32) * ROUNDS,
    )
    total = over_tiles(put, zero)
    fill = power_of_two(min(size, tile))

    def clear(j: Array, _: None) -> None:
        slot = j * fill + jnp.arange(fill)
        plgpu.store(index_ref.at[slot], jnp.full(fill, -1), mask=(slot >= total) & (slot < size))

    jax.lax.fori_loop(0, pl.cdiv(size, fill), clear, None)
