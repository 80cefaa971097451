"""The entries of learned tokens, for which a prompt's budget pays before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.cache import Layers, Slots
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import LearnedTokens, Pass
from kvjax.runtime.clock import Run, run_at_once

from .layers import in_rows
from .replays import left


class Beside(NamedTuple):
    """Entries beside those that are retained of a prompt.

    Attributes:
        entries: of each layer; None for none.
        next_position: the position behind them in each row.
    """

    entries: Sequence[Slots | None]
    next_position: Int[Array, "B"]

    @classmethod
    def nothing(cls, cache: KVCache) -> Beside:
        """Returns no entries behind a cache."""
        return cls((None,) * len(cache.entries), cache.length)


def with_learned(params: Decoder, cache: KVCache, *, run: Run = run_at_once) -> tuple[KVCache, Beside]:
    """Returns the cache of a prompt, whose budget has paid for the policy's learned tokens, and their entries.

    Args:
        cache: of a prompt that has been read and replayed, before its budget is allocated.
        run: how programs are run.
    """
    learned = cache.policy.learned
    if learned is None:
        return cache, Beside.nothing(cache)
    layers = [Slots.only(positions=layer.positions, capacity=layer.capacity) for layer in cache.entries]
    part, capacities, length = run(_paid, layers, cache.length, learned=learned, mesh=cache.mesh)
    entries = left(params, cache, part, run=run)
    paid = (replace(layer, capacity=rest.capacity) for layer, rest in zip(cache.entries, capacities, strict=True))
    return replace(cache, entries=Layers(tuple(paid))), Beside(entries, length)


@partial(jax.jit, static_argnames=("learned", "mesh"))
def _paid(
    layers: Sequence[Slots], length: Int[Array, "B"], *, learned: LearnedTokens, mesh: Mesh | None
) -> tuple[Pass, list[Slots], Int[Array, "B"]]:
    """Returns the pass of learned tokens, the capacity that they leave each layer, and each row's length behind them.

    They run in rows from which something will be evicted.
    """
    evicts = [jnp.any(layer.occupancy > layer.capacity, axis=1) for layer in layers]
    part = Pass.learned(learned.gates, learned.count, jnp.where(jnp.any(jnp.stack(evicts), axis=0), length, 0))
    part, after = in_rows((part, length + part.lengths), mesh)
    rest = [Slots.only(capacity=layer.capacity - part.lengths[:, None]) for layer in layers]
    return part, rest, after
