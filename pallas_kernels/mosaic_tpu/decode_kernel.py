"""The kernel of `mosaic_decode`: what one step does with the tile of a head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.lax import div, rem
from jaxtyping import Array, Float

from ..arrays import Fold
from ..softmax import capped, finite_or_zero
from ..window_scores.reduction import Reduction
from .codes import clear_outside, read, tile_logits, weighted_values
from .common import SoftmaxScratch, visible_in_tile
from .steps import Steps


@dataclass(frozen=True, eq=False)
class Body:
    """The kernel: adds the tile of a step to the softmax of its head, and writes results.

    Attributes:
        size: entries per part.
        rows: T.
        lines: lanes of positions that are fetched together.
        lane_heads: J.
        logits: whether to write the logits.
        extra_reduction: of the weights of the extra rows, if there are any.
        fold: over the group, of the weights that rows received, if they are requested.
        extra_count: the number of extra rows of a kv head without padding.
    """

    steps: Steps
    size: int
    rows: int
    lines: int
    lane_heads: int
    scale: float
    window: int | None
    softcap: float | None
    transposed: bool
    biased: bool
    logits: bool
    extra_reduction: Reduction | None
    fold: Fold | None
    group: int
    extra_count: int

    def __call__(self, *refs: Any) -> None:
        left = iter(refs)
        steps = self.steps.read(tuple(next(left) for _ in self.steps.scalars))
        start, used = next(left), next(left)
        q, t = next(left), next(left)
        keys, values = ([next(left) for _ in range(steps.parts)] for _ in range(2))
        p, bias = next(left), next(left) if self.biased else None
        extra = [next(left) for _ in range(3)] if self.extra_reduction else []
        out, lse = next(left), next(left)
        all_logits = next(left) if self.logits else None
        scores = next(left) if self.extra_reduction else None
        received = next(left) if self.fold else None
        softmax = SoftmaxScratch(*(next(left) for _ in range(3)))
        stored_logits = next(left) if self.fold else None
        core, i = pl.program_id(0), pl.program_id(1)
        step = steps.step(core, i)
        n, tile = steps.tile(step)
        line, size, idle = rem(div(n, self.lane_heads), self.lines), self.size, steps.idle(core, i)

        @pl.when((step == steps.begin[n]) & ~idle)
        def _() -> None:
            softmax.begin()

        def add(part: int) -> None:
            """Adds a part that has rows of the head."""
            first = (tile * steps.parts + part) * size
            at = slice(part * size, (part + 1) * size)
            begin, end = start[n] - first, start[n] + used[n] - first
            index = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
            own = (index >= begin) & (index < end)
            here = jax.tree.map(read, keys[part])
            there = clear_outside(jax.tree.map(read, values[part]), self.transposed, begin, end)

            def line_of(x: Any) -> Array:
                return x[pl.ds(line, 1), at]

            def logits_from(queries: Any, t: Any) -> Array:
                logits = capped(tile_logits(queries[...], here, self.transposed) * self.scale, self.softcap)
                if bias is not None:
                    logits += line_of(bias)
                return jnp.where(visible_in_tile(t[...], line_of(p), self.window, own), logits, -jnp.inf)

            logits = logits_from(q, t)
            softmax.add(logits, partial(weighted_values, there, self.transposed))
            if all_logits is not None:
                all_logits[:, at] = jnp.where(own, logits[: all_logits.shape[0]], all_logits[:, at])
            if stored_logits is not None:
                stored_logits[:, self.place(tile * steps.parts + part)] = logits[: stored_logits.shape[0]]
            if self.extra_reduction is not None and scores is not None:
                queries, sums, positions = extra
                weights = jnp.exp(logits_from(queries, positions) - sums[...])
                weights = reduced(weights[: self.extra_count], self.extra_reduction, self.group)
                scores[:, at] = jnp.where(own, weights, scores[:, at])  # other heads may have other rows of the tile

        for part in range(steps.parts):
            block = tile * steps.parts + part
            pl.when((block >= steps.first[n]) & (block < steps.stop[n]) & ~idle)(partial(add, part))

        @pl.when((step + 1 == steps.begin[n + 1]) & ~idle)
        def _() -> None:
            context, sums = softmax.end()
            out[...], lse[...] = context.astype(out.dtype), sums
            if received is not None and stored_logits is not None and self.fold is not None:
                reduction = Reduction("sum", self.fold, "group")
                finite = finite_or_zero(sums)[: stored_logits.shape[0]]
                received[...] = jnp.zeros(received.shape, jnp.float32)

                def receive(block: Array, _: None) -> None:
                    weights = jnp.exp(stored_logits[:, self.place(block)] - finite)
                    received[:, self.place(block)] = reduced(weights, reduction, self.group)

                jax.lax.fori_loop(0, steps.stop[n], receive, None)

    def place(self, block: Array) -> Any:
        """Returns where the numbers of a part are, in a row with all parts of a lane."""
        return slice(None) if self.rows <= self.size else pl.ds(pl.multiple_of(block * self.size, self.size), self.size)


def reduced(weights: Float[Array, "G*W K"], reduction: Reduction, group: int) -> Float[Array, "1 K"]:
    """Reduces weights over the group and the queries. A mean over queries is not supported."""
    over_rows, over_group = (jnp.max if x == "max" else jnp.sum for x in (reduction.rows, reduction.group))
    if over_rows is over_group or group == 1:
        total = over_rows(weights, axis=0, keepdims=True)
    elif weights.shape[0] == group:
        total = over_group(weights, axis=0, keepdims=True)
    else:
        each = weights.reshape(group, -1, weights.shape[1])
        if reduction.first == "group":
            total = over_rows(over_group(each, axis=0), axis=0, keepdims=True)
        else:
            total = over_group(over_rows(each, axis=1), axis=0, keepdims=True)
    return total / group if reduction.group == "mean" else total
