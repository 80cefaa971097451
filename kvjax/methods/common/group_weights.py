"""The weights that the queries of a text give to each entry, averaged over query groups, some queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction, capped, finite_or_zero, visible
from kvjax.pallas_kernels.arrays import pad
from kvjax.policy import Attended, Needs, Received

ROWS = 64  # queries that are scored at once
# The observation that a score of such weights declares.
NEEDS = Needs(received=Received(Reduction(), calls="steps"), queries="rotated")

State = TypeVar("State")


def fold_weights(
    fold: Callable[[State, Float[Array, "B H R M"], Int[Array, "B R"]], State],
    state: State,
    entries: Slots,
    attended: Attended,
) -> State:
    """Folds the queries of a call into a state, in order of position and in blocks of R.

    It serves what no reduction of the kernels computes. On a mesh where devices hold the same kv head, they exchange
    the group's queries.

    Args:
        fold: (state, weights averaged over each query group, positions of the queries) -> state. An entry that a query
            does not see has weight 0. Padding has position -1 and weights 0.
        state: before the queries of this call.
    """
    if attended.received is not None:
        return fold(state, attended.received[:, :, None], attended.positions[:, :1])
    queries, lse = (attended.heads.whole_groups(x) for x in (attended.queries, attended.lse))
    B, Hq, W, D = queries.shape
    H, rows = entries.positions.shape[1], min(ROWS, W)
    of_groups = (B, H, Hq // H, -1, rows)
    q = pad(queries, -W % rows, axis=2).reshape(*of_groups, D)
    lse = pad(finite_or_zero(lse), -W % rows, axis=2).reshape(of_groups)
    t = pad(attended.positions, -W % rows, axis=1, value=-1).reshape(B, -1, rows)

    def add(state: State, block: tuple[Array, Array, Array]) -> tuple[State, None]:
        q, lse, t = block
        logits = jnp.einsum("BHGRD,BHMD->BHGRM", q, entries.keys, preferred_element_type=jnp.float32)
        logits = capped(logits * attended.scale, attended.layer.softcap)
        if entries.bias is not None:
            logits = logits + entries.bias[:, :, None, None]
        seen = visible(t, entries.positions, attended.window)[:, :, None]
        weights = jnp.mean(jnp.exp(jnp.where(seen, logits - lse[..., None], -jnp.inf)), axis=2)
        return fold(state, weights, t), None

    blocks = jnp.moveaxis(q, 3, 0), jnp.moveaxis(lse, 3, 0), jnp.moveaxis(t, 1, 0)
    return jax.lax.scan(add, state, blocks)[0]
