"""Attention of a few query rows over lanes of entries on TPUs (Mosaic): what slots and segments have in common.

Slots are lanes with one segment each. The G W query rows of a kv head are one tile, so keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div
from jaxtyping import Array, Float, Int

from ..arrays import Fold, pad
from ..quantized import QuantizedArray
from ..slot_attention.asked import Asked
from .codes import QueryRows, check_alike, entry_nbytes, merge_heads, transposed_storage
from .common import (
    LANES,
    MOST_QUERY_ROWS,
    MOST_TILE_LOGITS,
    SUBLANES,
    VMEM_BYTES,
    Interpret,
    SoftmaxScratch,
    check,
    chip,
    compiler_params,
    in_place,
    round_up,
    tile_size,
)
from .decode_kernel import Body
from .steps import Steps

MOST_EXTRA_ROWS = 512  # extra query rows per kv head; more take a pass of their own


class Found(NamedTuple):
    """The results of `attend`.

    Attributes:
        received: what rows received, for lanes with one segment each; undefined after a head's last part. None unless
            it is requested and fits the chip.
        logits: of the R = G W query rows; -inf where not visible, undefined in rows that no head uses. None unless
            requested.
        scores: of the extra query rows; undefined in rows that no head uses. None if there are none, or too many.
    """

    context: Float[Array, "B Hq W D"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B P T"] | None
    logits: Float[Array, "B P R T"] | None
    scores: Float[Array, "B P T"] | None


def serves(asked: Asked | None, group: int) -> bool:
    """Returns whether the pass over the keys can score these extra query rows."""
    return asked is not None and group * asked.positions.shape[1] <= MOST_EXTRA_ROWS and asked.reduction.rows != "mean"


def attend(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B P T D"] | QuantizedArray,
    v: Float[Array, "B P T D"] | QuantizedArray,
    q_positions: Int[Array, "B W"],
    per_row: Sequence[Array],
    start: Int[Array, "B H"],
    used: Int[Array, "B H"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    interpret: Interpret,
    name: str,
    parts: int,
    received: Fold | None = None,
    logits: bool = False,
    asked: Asked | None = None,
) -> Found:
    """Attention of W query rows over the rows start .. start + used - 1 of each head's lane.

    Args:
        k: a lane has the segments of J = H / P consecutive kv heads, one after another.
        per_row: positions and, if there is one, the bias: [B, P, T], or [B P, 1, T] to fetch one lane at a time.
        name: of the kernel.
        parts: of a tile, at most. Each part has buffers and code of its own, and is fetched only if it has rows of the
            head.
        received: how to reduce what rows received over the group, if it is requested. J is 1.
        logits: whether to return the logits.
        asked: extra query rows. Their scores are returned if `serves` says so.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32 or bfloat16; for more than MOST_QUERY_ROWS rows
            per kv head, which would not fit the chip's memory beside a tile of keys; for keys and values that are not
            quantised alike; for more tiles than scalar memory holds numbers for.
    """
    check(q, k, v, quantized=True)
    check_alike(k, v)
    B, Hq, W = q.shape[:3]
    H, (P, T) = start.shape[1], k.shape[1:3]
    G, J, lines = Hq // H, H // P, per_row[0].shape[1]
    rows = QueryRows.of(q, q_positions, k, H)
    R, stacked = rows.height, rows.queries.shape[-2]
    if stacked > MOST_QUERY_ROWS:
        raise NotImplementedError(f"{stacked} query rows per kv head: expected at most {MOST_QUERY_ROWS}")
    extra = _extra_rows(asked, k, H) if asked is not None and serves(asked, G) else ()
    reduction = asked.reduction if extra and asked is not None else None
    here, stored = chip(), transposed_storage(k)
    most_rows = stacked + (extra[0].shape[-2] if extra else 0)
    size = tile_size(T, rows_per_part(here.tile_bytes // parts, entry_nbytes(k), most_rows))
    blocks = -(-T // size)
    parts = min(parts, blocks)
    tile, tiles = parts * size, -(-blocks // parts)
    steps = Steps.of(
        start.reshape(-1),
        used.reshape(-1),
        size=size,
        parts=parts,
        most=B * P * (tiles if J == 1 else min(tiles + J, J * tiles)),
        cores=here.cores,
        together=J if extra or logits else 1,  # heads of a lane write to the same tiles
    )

    def at_step(block: Any) -> Any:
        """The index map that gives block(n, step, steps), for head n."""

        def index(core: Array, i: Array, *scalars: Any) -> Any:
            plan = steps.read(scalars[: len(steps.scalars)])
            step = plan.step(core, i)
            return block(plan.head(step), step, plan)

        return index

    def per_head(*shape: int) -> pl.BlockSpec:
        """All of one head's part of an array [B*H, ...]."""
        return pl.BlockSpec((None, *shape), at_step(lambda n, *_: (n, *(0,) * len(shape))))

    def per_query(rows: int) -> pl.BlockSpec:
        """One batch row's column of an array [B, rows, 1]."""
        return pl.BlockSpec((None, rows, 1), at_step(lambda n, *_: (div(n, H), 0, 0)))

    def part_of(part: int, x: Any) -> Any:
        """A part of a tile of keys or values. Scales have rows last, and so have transposed arrays."""

        def block(lanes_last: bool, step: Array, plan: Steps) -> tuple[Any, ...]:
            n, at = plan.fetched(step, part)
            place = jnp.minimum(at * parts + part, blocks - 1)
            return (div(n, J), 0, place) if lanes_last else (div(n, J), place, 0)

        def spec(x: Array, lanes_last: bool) -> pl.BlockSpec:
            shape = (None, x.shape[1], size) if lanes_last else (None, size, x.shape[2])
            return pl.BlockSpec(shape, at_step(lambda _, step, plan: block(lanes_last, step, plan)))

        if isinstance(x, QuantizedArray):
            specs: Any = {"codes": spec(x.codes, stored), "scales": spec(x.scales, True)}
            return replace(x, **specs)
        return spec(x, stored)

    def tile_of_lines(n: Array, step: Array, plan: Steps) -> tuple[Any, ...]:
        n, at = plan.fetched(step)
        return div(n, J * lines), 0, jnp.minimum(at, tiles - 1)

    def tile_of_lane(n: Array, step: Array, plan: Steps) -> tuple[Any, ...]:
        return div(n, J), 0, jnp.minimum(plan.tile(step)[1], tiles - 1)

    entries = [jax.tree.map(partial(in_place, interpret=interpret), merge_heads(x, stored)) for x in (k, v)]
    out_specs = [per_head(*rows.shape), per_head(R, 1)]
    out_shape = [jax.ShapeDtypeStruct((B * H, *rows.shape), q.dtype), jax.ShapeDtypeStruct((B * H, R, 1), jnp.float32)]
    scratch = SoftmaxScratch.scratch(rows.shape)
    padded = tiles * tile
    by_tile = [G * W] * logits + [1] * bool(extra)  # numbers for each row of a lane
    out_specs += [pl.BlockSpec((None, each, tile), at_step(tile_of_lane)) for each in by_tile]
    out_shape += [jax.ShapeDtypeStruct((B * P, each, padded), jnp.float32) for each in by_tile]
    # What rows received needs the log-sum-exp of all tiles, so all logits stay on the chip until the last tile.
    stores_logits = received is not None and 4 * padded * (round_up(R, SUBLANES) + 2 * SUBLANES) <= VMEM_BYTES // 2
    if stores_logits:
        out_specs.append(per_head(1, padded))
        out_shape.append(jax.ShapeDtypeStruct((B * H, 1, padded), jnp.float32))
        scratch.append(pltpu.VMEM((G * W, padded), jnp.float32))
    body = Body(
        steps=steps,
        size=size,
        rows=T,
        lines=lines,
        lane_heads=J,
        scale=scale,
        window=window,
        softcap=softcap,
        transposed=stored,
        biased=len(per_row) > 1,
        logits=logits,
        extra_reduction=reduction,
        fold=received if stores_logits else None,
        group=G,
        extra_count=G * asked.positions.shape[1] if asked is not None else 0,
    )
    context, sums, *more = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps.scalars) + 2,
            grid=steps.grid,
            in_specs=[
                per_head(*rows.queries.shape[1:]),
                per_query(R),
                *(part_of(part, x) for x in entries for part in range(parts)),
                *[pl.BlockSpec((None, lines, tile), at_step(tile_of_lines))] * len(per_row),
                *[per_head(*x.shape[1:]) for x in extra[:2]],
                *[per_query(x.shape[1]) for x in extra[2:]],
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=compiler_params("parallel", "arbitrary"),
        interpret=interpret,
        name=name,
    )(
        *steps.scalars,
        start.astype(jnp.int32).reshape(-1),
        used.astype(jnp.int32).reshape(-1),
        rows.queries,
        rows.positions,
        *(x for x in entries for _ in range(parts)),
        *per_row,
        *extra,
    )
    context, lse = rows.unpad(context).reshape(q.shape), rows.unpad(sums).reshape(B, Hq, W)
    numbers = [x[..., :T].reshape(B, P, -1, T) for x in more]
    found = numbers.pop(0) if logits else None
    scores = numbers.pop(0)[:, :, 0] if extra else None
    weights = numbers.pop()[:, :, 0] if stores_logits else None
    return Found(context, lse, weights, found, scores)


def rows_per_part(part_bytes: int, nbytes: int, rows: int) -> int:
    """Entries per part of a tile, so that the logits of a part stay small.

    Args:
        part_bytes: of the keys of a part.
        nbytes: bytes of the keys of one entry.
        rows: query rows of a kv head.
    """
    most = min(part_bytes // nbytes, MOST_TILE_LOGITS // rows)
    return max(most // LANES, 1) * LANES


def _extra_rows(asked: Asked, k: Array | QuantizedArray, heads: int) -> tuple[Array, Array, Array]:
    """The extra queries of each kv head, their log-sum-exps as a column (+inf for padding), and their positions."""
    rows = QueryRows.of(asked.queries, asked.positions, k, heads)
    lse = jnp.where((asked.positions < 0)[:, None] | jnp.isneginf(asked.lse), jnp.inf, asked.lse)
    lse = pad(lse.reshape(len(rows.queries), rows.given, 1), rows.height - rows.given, axis=1, value=jnp.inf)
    return rows.queries, lse, rows.positions
