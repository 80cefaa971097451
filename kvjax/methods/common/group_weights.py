"""Computes the weights of a text's queries on each entry, averaged over query groups, in blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction, capped, finite_or_zero, fold
from kvjax.pallas_kernels.arrays import pad
from kvjax.pallas_kernels.visibility import span, visible, visible_tiles
from kvjax.policy import Attended, Needs, Received

ROWS, ENTRIES = 128, 512  # queries and entries that are scored at once
# The observation that a score of such weights declares.
NEEDS = Needs(received=Received(Reduction(), calls="steps"), queries="rotated")

State = TypeVar("State")


def fold_weights(
    fold_in: Callable[[State, Float[Array, "B H R M"], Int[Array, "B R"], Int[Array, "B H M"]], State],
    state: State,
    entries: Slots,
    attended: Attended,
) -> State:
    """Folds the queries of a call into a state, in order of position and in blocks of R, for tiles of M entries.

    It serves what no reduction of the kernels computes. On a mesh where devices hold the same kv head, they exchange
    the group's queries.

    Args:
        fold_in: (state, weights averaged over each query group, positions of the queries, positions of the entries) ->
            state. An entry that a query does not see has weight 0. Padding has position -1 and weights 0.
        state: before the queries of this call; arrays [..., M].
    """
    if attended.received is not None:
        return fold_in(state, attended.received[:, :, None], attended.positions[:, :1], entries.positions)
    queries, lse = (attended.heads.whole_groups(x) for x in (attended.queries, attended.lse))
    B, Hq, W, D = queries.shape
    H, M = entries.positions.shape[1:]
    rows, size = min(ROWS, W), min(ENTRIES, M)
    q = pad(queries.reshape(B, H, Hq // H, W, D), -W % rows, axis=3)
    lse = pad(finite_or_zero(lse).reshape(B, H, Hq // H, W), -W % rows, axis=3)
    positions = pad(attended.positions, -W % rows, axis=1, value=-1)
    seen = visible_tiles(positions, entries.positions, rows=rows, keys=size, window=attended.window)

    def fold_tile(_: None, tile: tuple[Any, ...]) -> tuple[None, State]:
        """Folds the weights of a tile of entries, from the first to the last block of queries that sees some of it."""
        keys, held, bias, state, (first, last) = tile

        def fold_block(block: Array, state: State) -> State:
            own = partial(jax.lax.dynamic_slice_in_dim, start_index=block * rows, slice_size=rows)
            t = own(positions, axis=1)
            logits = jnp.einsum("BHGRD,BHMD->BHGRM", own(q, axis=3), keys, preferred_element_type=jnp.float32)
            logits = capped(logits * attended.scale, attended.layer.softcap)
            if bias is not None:
                logits = logits + bias[:, :, None, None]
            logits = logits - own(lse, axis=3)[..., None]
            shown = visible(t, held, attended.window)[:, :, None]
            return fold_in(state, fold(jnp.exp(jnp.where(shown, logits, -jnp.inf)), "mean", axis=2), t, held)

        return None, jax.lax.fori_loop(first, last, fold_block, state)

    def tiles(x: Array, value: int = 0, axis: int = 2) -> Array:
        padded = pad(x, -M % size, axis=axis, value=value)
        return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :M]

    each = (
        tiles(entries.keys),
        tiles(entries.positions, value=-1),
        None if entries.bias is None else tiles(entries.bias),
        jax.tree.map(lambda x: tiles(x, axis=x.ndim - 1), state),
        span(jnp.any(seen, axis=(0, 1))),
    )
    return jax.tree.map(joined, jax.lax.scan(fold_tile, None, each)[1])
