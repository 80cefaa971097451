"""Window scores on a TPU: tiles of weights that never leave the chip, added up along the queries.

The log-sum-exp of the queries, where it is not given, takes a pass over the keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..mosaic import (
    LANES,
    SMEM,
    SUBLANES,
    Interpret,
    as_column,
    check,
    in_place,
    lies_turned,
    params,
    product,
    round_up,
    seen,
    tile_size,
)
from ..tiling import pad
from .reference import Reduction

BLOCK_Q = 256  # query rows of a head to a tile
LOGITS = 1 << 17  # of a head and tile, at most
TILE_BYTES = 512 << 10  # of keys
PLAIN = Reduction()


def window_scores(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    lse: Float[Array, "B Hq W"] | None = None,
    window: int | None = None,
    bias: Float[Array, "B H M"] | None = None,
    causal: bool = True,
    reduction: Reduction = PLAIN,
    interpret: Interpret = False,
) -> Float[Array, "B H M"]:
    """As `reference.window_scores`, which says what it computes.

    Raises NotImplementedError for float16, and for more tiles of keys than scalars fit the chip's memory for them.
    """
    check(q, k)
    B, Hq, W, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    rows = min(BLOCK_Q, round_up(W, 2 * SUBLANES if W <= LANES else LANES))
    lanes = max(rows, LANES)  # of what a tile knows of its queries, one number each
    keys = tile_size(M, entries_of_a_tile(D, k.dtype.itemsize, rows))
    blocks, key_blocks = -(-W // rows), -(-M // keys)
    if 8 * B * H * (key_blocks + 1) > SMEM:
        raise NotImplementedError(f"{B * H} x {key_blocks} tiles of keys")
    q = pad(q.reshape(B * H, G, W, D), -W % rows, axis=2)
    t = pad(q_positions.astype(jnp.int32), blocks * lanes - W, axis=1, value=-1)
    p = k_positions.astype(jnp.int32).reshape(B * H, 1, M)
    added = [] if bias is None else [bias.reshape(B * H, 1, M)]
    turned = lies_turned(D)
    entries = jnp.swapaxes(k, 2, 3).reshape(B * H, D, M) if turned else k.reshape(B * H, M, D)
    entries = in_place(entries, interpret)
    plan = Plan(rows, lanes, keys, M, H, turned, scale, window, bias is not None)
    if lse is None:
        lse = _log_sum_exp(plan, q, t[:, None], entries, p, added, interpret)
    else:
        lse = pad(lse.reshape(B * H, G, W), blocks * lanes - W, axis=2)
    # A query that sees nothing, or is none, weighs nothing.
    lse = jnp.where((jnp.repeat(t, H, axis=0)[:, None] < 0) | (lse == -jnp.inf), jnp.inf, lse)
    lse = pad(lse, -G % SUBLANES, axis=1, value=jnp.inf)
    bounds = _bounds(t.reshape(B, blocks, lanes), p.reshape(B, H, M), keys, window)

    def of_queries(n: Array, j: Array, i: Array, first: Any, last: Any, *_: Any) -> Array:
        at = n * key_blocks + j
        return jnp.clip(i, jnp.minimum(first[at], blocks - 1), jnp.maximum(last[at], 0))

    def of_keys(n: Array, j: Array, lowest: Any, highest: Any) -> Array:
        return jnp.clip(j, lowest[n], highest[n])

    along = pl.BlockSpec((None, 1, keys), lambda n, j, i, first, last, low, high: (n, 0, of_keys(n, j, low, high)))
    flat = pl.BlockSpec((None, D, keys), along.index_map)
    down = pl.BlockSpec((None, keys, D), lambda n, j, i, first, last, low, high: (n, of_keys(n, j, low, high), 0))
    apart = G if not _commute(reduction) and reduction.first == "rows" else 1
    scores = pl.pallas_call(
        partial(_kernel, plan, reduction, causal or window is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B * H, key_blocks, blocks),
            in_specs=[
                pl.BlockSpec((None, G, rows, D), lambda n, j, i, *at: (n, 0, of_queries(n, j, i, *at), 0)),
                pl.BlockSpec((None, 1, lanes), lambda n, j, i, *at: (jax.lax.div(n, H), 0, of_queries(n, j, i, *at))),
                pl.BlockSpec((None, lse.shape[1], lanes), lambda n, j, i, *at: (n, 0, of_queries(n, j, i, *at))),
                flat if turned else down,
                along,
                *(along for _ in added),
            ],
            out_specs=pl.BlockSpec((None, 1, keys), lambda n, j, i, *_: (n, 0, j)),
            scratch_shapes=[pltpu.VMEM((apart, keys), jnp.float32), pltpu.VMEM((1, keys), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B * H, 1, M), jnp.float32),
        compiler_params=params("parallel", "arbitrary", "arbitrary"),
        interpret=interpret,
        name="window_scores",
    )(*bounds, q, t[:, None], lse, entries, p, *added)
    return scores.reshape(B, H, M)


@dataclass(frozen=True)
class Plan:
    """Attributes: a tile's queries of a head, numbers known of them, and keys; and what is the same for all tiles."""

    rows: int
    lanes: int
    keys: int
    M: int
    heads: int
    turned: bool
    scale: float
    window: int | None
    biased: bool

    @property
    def key_blocks(self) -> int:
        return -(-self.M // self.keys)


def entries_of_a_tile(head_dim: int, itemsize: int, rows: int) -> int:
    """So many that fetching them takes longer than beginning a step, and a head's logits stay small."""
    most = min(TILE_BYTES // (head_dim * itemsize), LOGITS // rows)
    return max(most // LANES, 1) * LANES


def _commute(reduction: Reduction) -> bool:
    return (reduction.rows == "max") == (reduction.group == "max")


def _bounds(
    t: Int[Array, "B I R"], p: Int[Array, "B H M"], keys: int, window: int | None
) -> tuple[Int[Array, "B*H*J"], Int[Array, "B*H*J"], Int[Array, "B*H"], Int[Array, "B*H"]]:
    """The first and the last tile of queries that see a tile of keys, and the first and last tile that is seen."""
    B, H, M = p.shape
    blocks = t.shape[1]
    far = jnp.iinfo(jnp.int32).max
    p = pad(p, -M % keys, axis=2, value=-1).reshape(B, H, -1, 1, keys)
    oldest, newest = jnp.min(jnp.where(p < 0, far, p), axis=-1), jnp.max(p, axis=-1)
    see = jnp.max(t, axis=-1)[:, None, None] >= oldest
    if window is not None:
        see &= (newest >= 0) & (jnp.min(jnp.where(t < 0, far, t), axis=-1)[:, None, None] - newest < window)
    first = jnp.where(jnp.any(see, axis=-1), jnp.argmax(see, axis=-1), blocks)
    last = jnp.where(jnp.any(see, axis=-1), blocks - 1 - jnp.argmax(see[..., ::-1], axis=-1), -1)
    some = first < blocks
    lowest = jnp.argmax(some, axis=-1)
    highest = jnp.where(jnp.any(some, axis=-1), some.shape[-1] - 1 - jnp.argmax(some[..., ::-1], axis=-1), lowest)
    first, last, lowest, highest = (x.astype(jnp.int32).reshape(-1) for x in (first, last, lowest, highest))
    return first, last, lowest, highest


def _kernel(
    plan: Plan,
    reduction: Reduction,
    pairwise: bool,
    first: Any,
    last: Any,
    lowest: Any,
    highest: Any,
    q: Any,
    t: Any,
    lse: Any,
    k: Any,
    p: Any,
    *refs: Any,
) -> None:
    bias, refs = (refs[0], refs[1:]) if plan.biased else (None, refs)
    out, score, viewers = refs
    group = q.shape[0]
    n, j, i = (pl.program_id(axis) for axis in range(3))
    at = n * plan.key_blocks + j
    over_rows = jnp.max if reduction.rows == "max" else jnp.sum

    def add(row: int, weights: Float[Array, "R K"]) -> None:
        """Over the queries of the tile, and to what the tiles before have given."""
        new, old = over_rows(weights, axis=0, keepdims=True), score[row : row + 1]
        score[row : row + 1] = jnp.maximum(old, new) if reduction.rows == "max" else old + new

    @pl.when(i == 0)
    def _() -> None:
        score[...] = jnp.zeros(score.shape, jnp.float32)
        viewers[...] = jnp.zeros(viewers.shape, jnp.float32)

    @pl.when((i >= first[at]) & (i <= last[at]))
    def _() -> None:
        column = as_column(t[...])[: plan.rows]
        sums = lse[...].T[: plan.rows]
        see = seen(column, p[...], plan.window) if pairwise else (p[...] >= 0) & (column >= 0)
        folded: Array | None = None
        for g in range(group):
            logits = product(q[g], k[...], (1, 0 if plan.turned else 1)) * plan.scale - sums[:, g : g + 1]
            if bias is not None:
                logits += bias[...]
            weights = jnp.exp(jnp.where(see, logits, -jnp.inf) if pairwise else logits)
            if score.shape[0] > 1:
                add(g, weights)
            elif folded is None:
                folded = weights
            else:
                folded = jnp.maximum(folded, weights) if reduction.group == "max" else folded + weights
        if folded is not None:
            add(0, folded)
        if reduction.rows == "mean":
            viewers[...] += jnp.sum(see.astype(jnp.float32), axis=0, keepdims=True)

    @pl.when(i == pl.num_programs(2) - 1)
    def _() -> None:
        each = [score[g : g + 1] for g in range(score.shape[0])]
        total = reduce(jnp.maximum if reduction.group == "max" else jnp.add, each)
        if reduction.group == "mean":
            total /= group
        if reduction.rows == "mean":
            total /= jnp.maximum(viewers[...], 1.0)
        out[...] = jnp.where(p[...] >= 0, total, 0.0)


def _log_sum_exp(
    plan: Plan,
    q: Float[Array, "N G W D"],
    t: Int[Array, "B 1 L"],
    k: Float[Array, "N M D"] | Float[Array, "N D M"],
    p: Int[Array, "N 1 M"],
    added: list[Float[Array, "N 1 M"]],
    interpret: Interpret,
) -> Float[Array, "N G L"]:
    """Of each query over all keys."""
    N, G, W, D = q.shape
    rows, lanes, keys = plan.rows, plan.lanes, plan.keys
    along = pl.BlockSpec((None, 1, keys), lambda n, i, j: (n, 0, j))
    flat = pl.BlockSpec((None, D, keys), along.index_map)
    down = pl.BlockSpec((None, keys, D), lambda n, i, j: (n, j, 0))
    return pl.pallas_call(
        partial(_sum_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(N, W // rows, plan.key_blocks),
            in_specs=[
                pl.BlockSpec((None, G, rows, D), lambda n, i, j: (n, 0, i, 0)),
                pl.BlockSpec((None, 1, lanes), lambda n, i, j: (jax.lax.div(n, plan.heads), 0, i)),
                flat if plan.turned else down,
                along,
                *(along for _ in added),
            ],
            out_specs=pl.BlockSpec((None, G, lanes), lambda n, i, j: (n, 0, i)),
            scratch_shapes=[pltpu.VMEM((G, rows), jnp.float32)] * 2,
        ),
        out_shape=jax.ShapeDtypeStruct((N, G, t.shape[2]), jnp.float32),
        compiler_params=params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="window_log_sum_exp",
    )(q, t, k, p, *added)


def _sum_kernel(plan: Plan, q: Any, t: Any, k: Any, p: Any, *refs: Any) -> None:
    """Keys first, so that what is known of a query, and summed up for it, lies along the lanes."""
    bias, refs = (refs[0], refs[1:]) if plan.biased else (None, refs)
    out, total, peak = refs
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)
        peak[...] = jnp.full(peak.shape, -jnp.inf, jnp.float32)

    column = as_column(p[...])
    see = (column >= 0) & (column <= t[:, : plan.rows])
    if plan.window is not None:
        see &= t[:, : plan.rows] - column < plan.window
    if plan.M % plan.keys:
        see &= jax.lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0) < plan.M - j * plan.keys
    for g in range(q.shape[0]):
        logits = product(k[...], q[g], (0 if plan.turned else 1, 1)) * plan.scale
        if bias is not None:
            logits += as_column(bias[...])
        logits = jnp.where(see, logits, -jnp.inf)
        before = peak[g : g + 1]
        new = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.sum(jnp.exp(logits - finite), axis=0, keepdims=True)
        total[g : g + 1] = total[g : g + 1] * jnp.exp(before - finite) + weights
        peak[g : g + 1] = new

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = jnp.zeros(out.shape, jnp.float32)
        out[:, : plan.rows] = peak[...] + jnp.log(jnp.maximum(total[...], 1e-37))
