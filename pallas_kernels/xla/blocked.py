"""Prompt attention in plain XLA: blocked, with a running softmax (FlashAttention, arXiv 2205.14135).

No array has size N x M. One tile has BLOCK_Q queries of each head and BLOCK_K keys. Tiles above the diagonal and tiles
beyond the occupied slots are skipped.

What keys received comes from the same pass: the exponentials of one block of queries are kept for all keys, and scaled
and reduced once the log-sum-exp of the block is known. Contexts have the same bits whether or not that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import after_last, pad
from ..softmax import RunningSoftmax, capped, finite_or_zero
from ..window_scores.reduction import Reduction
from .exponential import exp
from .received import Total, Weights

BLOCK_Q = 256
BLOCK_K = 512
FAR = 2**31 - 1  # a position beyond all others
ROWS = 1024  # query rows that a tile should have: where blocks are short, it has several kv heads

T = TypeVar("T", int, Array)


class Kept(NamedTuple):
    """The tiles of one block of queries, in memory that the next block overwrites.

    Attributes:
        weights: exp(logit - peak).
        peaks: the largest logit of each query up to this tile; -inf if it has seen nothing.
    """

    weights: Float[Array, "tiles P GR K"]
    peaks: Float[Array, "tiles P GR"]

    def put(self, j: Array, weights: Array, peaks: Array) -> Kept:
        """The tiles with another tile j."""
        put = jax.lax.dynamic_update_index_in_dim
        return Kept(put(self.weights, weights, j, axis=0), put(self.peaks, peaks, j, axis=0))

    def scaled(self, j: Array, lse: Float[Array, "P GR"]) -> Weights:
        """The weights of tile j, given the log-sum-exp of each query; inf for a query without weights."""
        factors = exp(jax.lax.dynamic_index_in_dim(self.peaks, j, keepdims=False) - lse)

        def rows(first: int, number: int) -> Float[Array, "P R K"]:
            _, P, _, K = self.weights.shape
            part = jax.lax.dynamic_slice(self.weights, (j, 0, first, 0), (1, P, number, K))[0]
            return part * factors[:, first : first + number, None]

        return rows


class Run(NamedTuple):
    """Consecutive entries that are attended to tile by tile.

    Attributes:
        first: the index of the first entry.
        length: the number of entries.
    """

    first: int
    length: int

    @property
    def size(self) -> int:
        """Entries per tile."""
        return min(BLOCK_K, self.length)

    def tiles(self, bound: T) -> T:
        """The number of tiles of the first `bound` entries."""
        return (bound + self.size - 1) // self.size

    def start(self, j: Array) -> Int[Array, ""]:
        """The index of a tile's first entry. The last tile may reach back over entries of the tile before it."""
        return self.first + jnp.minimum(j * self.size, self.length - self.size)

    def repeated(self, j: Array) -> Int[Array, ""]:
        """The number of a tile's first entries that belong to the tile before it."""
        return self.first + j * self.size - self.start(j)


def blocked(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    reductions: Sequence[Reduction] = (),
    own: bool = True,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"], tuple[Float[Array, "B H *G M"], ...]]:
    """Computes what `scored_attention` returns; `prompt_attention` returns the first two."""
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    G = Hq // H
    block = min(BLOCK_Q, N)
    rows = N + -N % block
    most = max(ROWS // (G * block), 1)
    P = max(heads for heads in range(1, min(most, B * H) + 1) if B * H % heads == 0)
    t = pad(q_positions, rows - N, axis=1, value=-1)
    each = (
        pad(q * scale, rows - N, axis=2).reshape(-1, P, G, rows, D),
        *(x.reshape(-1, P, *x.shape[2:]) for x in (k, v)),
        jnp.repeat(t, H, axis=0).reshape(-1, P, rows),
        k_positions.reshape(-1, P, M),
        None if bias is None else bias.reshape(-1, P, M),
    )
    runs = [Run(first, length) for first, length in ((0, M - N), (M - N, N)) if length]
    scored = runs if own else runs[:1]
    shapes = [(run.tiles(run.length), P, G * block, run.size) for run in scored if reductions]
    # What is kept is written before it is read. Its first contents come from the layer's queries: of contents that are
    # the same in all layers of a program, XLA holds a copy for each layer at once.
    any_number = q[0, 0, 0, 0].astype(jnp.float32)
    kept = [Kept(jnp.full(shape, any_number), jnp.full(shape[:3], any_number)) for shape in shapes]
    attend = partial(_attend, runs=runs, block=block, window=window, softcap=softcap, reductions=tuple(reductions))
    _, (out, lse, received) = jax.lax.scan(attend, kept, each)
    out, lse = out.reshape(B, Hq, rows, D), lse.reshape(B, Hq, rows)
    return out[:, :, :N], lse[:, :, :N], tuple(x.reshape(B, H, *x.shape[2:]) for x in received)


def _attend(
    kept: list[Kept],
    each: tuple[Array, ...],
    *,
    runs: Sequence[Run],
    block: int,
    window: int | None,
    softcap: float | None,
    reductions: tuple[Reduction, ...],
) -> tuple[list[Kept], tuple[Array, Array, tuple[Array, ...]]]:
    """Context, log-sum-exp and received attention of P kv heads, and the memory for the next ones."""
    q, k, v, t, p, bias = each
    P, G, rows, D = q.shape
    M, new = k.shape[1], runs[-1].length
    p = jnp.where(p < 0, FAR, p)  # no query sees it, as no query that is padding sees anything
    occupied = jnp.max(after_last(p[:, : M - new] < FAR))

    def add_tile(
        running: RunningSoftmax, queries: Array, t_rows: Array, run: Run, j: Array
    ) -> tuple[RunningSoftmax, Float[Array, "P GR K"]]:
        """Adds tile j of a run. Returns its exponentials, too."""
        keys, values = (jax.lax.dynamic_slice_in_dim(x, run.start(j), run.size, axis=1) for x in (k, v))
        places = jax.lax.dynamic_slice_in_dim(p, run.start(j), run.size, axis=1)
        if run.length % run.size:
            places = jnp.where(jnp.arange(run.size) >= run.repeated(j), places, FAR)
        places = places[:, None]
        logits = jnp.einsum("PRD,PKD->PRK", queries, keys, preferred_element_type=jnp.float32)
        logits = capped(logits, softcap)
        if bias is not None:
            logits = logits + jax.lax.dynamic_slice_in_dim(bias, run.start(j), run.size, axis=1)[:, None]
        seen = places <= t_rows[:, :, None]
        if window is not None:
            seen &= t_rows[:, :, None] - places < window
        logits = jnp.where(seen[:, None], logits.reshape(P, G, block, run.size), -jnp.inf).reshape(logits.shape)
        peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1))
        finite = finite_or_zero(peak)
        weights = exp(logits - finite[..., None])
        shrink = exp(running.peak - finite)
        out = jnp.einsum("PRK,PKD->PRD", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        out, total = running.out * shrink[..., None] + out, running.total * shrink + jnp.sum(weights, axis=-1)
        return RunningSoftmax(out, total, peak), weights

    def query_block(
        carry: tuple[list[Kept], list[Array]], i: Array
    ) -> tuple[tuple[list[Kept], list[Array]], tuple[Array, Array]]:
        kept, totals = carry  # `kept` is of all runs, of the first one, or of none
        queries = jax.lax.dynamic_slice_in_dim(q, i * block, block, axis=2).reshape(P, G * block, D)
        t_rows = jax.lax.dynamic_slice_in_dim(t, i * block, block, axis=1)
        running = RunningSoftmax(
            jnp.zeros((P, G * block, D), jnp.float32),
            jnp.zeros((P, G * block), jnp.float32),
            jnp.full((P, G * block), -jnp.inf, jnp.float32),
        )
        # A number that is known only at run time keeps XLA from joining a single tile with what comes before and after,
        # where it would compute with other bits if received attention is asked for.
        asking = jnp.max(t_rows) >= 0
        bounds = [occupied, jnp.minimum((i + 1) * block, new)][-len(runs) :]
        numbers = [jnp.where(asking, run.tiles(bound), 0) for run, bound in zip(runs, bounds, strict=True)]
        written = []
        for r, run in enumerate(runs):

            def add(j: Array, state: tuple[RunningSoftmax, list[Kept]], run: Run = run) -> Any:
                running, held = state
                running, weights = add_tile(running, queries, t_rows, run, j)
                return running, [tiles.put(j, weights, running.peak) for tiles in held]

            running, held = jax.lax.fori_loop(0, numbers[r], add, (running, kept[r : r + 1]))
            written += held
        total = jnp.where(running.total == 0, 1.0, running.total)
        context, lse = (running.out / total[..., None]).astype(v.dtype), running.peak + jnp.log(total)
        shift = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # a query that sees nothing gives no weight
        for run, number, held in zip(runs, numbers, written, strict=False):

            def reduce_tile(j: Array, totals: list[Array], run: Run = run, held: Kept = held) -> list[Array]:
                weights = held.scaled(j, shift)
                return [kind.add(x, weights, G, block, run.start(j)) for kind, x in zip(kinds, totals, strict=True)]

            totals = jax.lax.fori_loop(0, number, reduce_tile, totals)
        return (written, totals), (context, lse)

    kinds = list(dict.fromkeys(map(Total.of, reductions)))
    carry = kept, [kind.zeros(P, G, M) for kind in kinds]
    (kept, totals), (out, lse) = jax.lax.scan(query_block, carry, jnp.arange(rows // block))
    out = jnp.moveaxis(out.reshape(-1, P, G, block, D), 0, 2).reshape(P, G, rows, D)
    lse = jnp.moveaxis(lse.reshape(-1, P, G, block), 0, 2).reshape(P, G, rows)
    found = dict(zip(kinds, totals, strict=True))
    received = tuple(Total.of(wanted).finished(found[Total.of(wanted)], wanted, G) for wanted in reductions)
    return kept, (out, lse, received)
