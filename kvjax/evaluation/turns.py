"""Questions that wait for their answers, of several policies, in groups that take their decode steps together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.evaluation.batches import Ask
from kvjax.kv_cache import KVCache
from kvjax.policies import parse


@dataclass(frozen=True)
class Turn:
    """A question of each row of a batch under one policy.

    Attributes:
        policy: the index of the policy.
        column: the index of the question within its reading.
        asks: the question of each row.
        facts: of each prompt of the batch, the fields of its answer that are known before it.
    """

    policy: int
    column: int
    asks: Sequence[Ask]
    facts: Sequence[Mapping[str, Any]]

    @property
    def single(self) -> bool:
        """Returns whether each question is one token, which is decoded instead of read."""
        return all(ask.tail.size == 1 for ask in self.asks)


@dataclass
class Group:
    """Turns whose decode steps are taken together, and the cache that the questions of each of them follow."""

    turns: list[Turn] = field(default_factory=list)
    caches: list[KVCache] = field(default_factory=list)

    def joined(self) -> KVCache:
        """Returns a cache with the rows of all turns. The group then holds no cache any more."""
        caches, self.caches = self.caches, []
        return caches[0] if len(caches) == 1 else _joined(caches)


@dataclass
class Waiting:
    """Turns that wait until others fill their group.

    A decode step reads the weights once for all rows, so a step of many rows costs little more than one of a few. Turns
    form a group if their policies evict nothing while decoding and their caches have equal shapes.

    Attributes:
        rows: the most rows of a group; None makes a group of each turn.
        groups: those that are not full, by what their turns have in common.
    """

    rows: int | None
    groups: dict[Hashable, Group] = field(default_factory=dict)

    def add(self, turn: Turn, cache: KVCache) -> Group | None:
        """Adds a turn, whose questions follow `cache`. Returns its group if that is full."""
        cache = _settled(cache)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(cache))
        key = jax.tree.structure(cache), shapes, turn.single
        group = self.groups.setdefault(key, Group())
        group.turns.append(turn)
        group.caches.append(cache)
        full = self.rows is None or (len(group.turns) + 1) * cache.batch_size > self.rows
        return self.groups.pop(key) if full else None

    def rest(self) -> Iterator[Group]:
        """Yields the groups that are not full."""
        while self.groups:
            yield self.groups.pop(next(iter(self.groups)))


def _settled(cache: KVCache) -> KVCache:
    """Returns a cache that evicts nothing any more under the policy `full`: it then equals those of other policies."""
    if cache.policy.every is not None or not cache.filled:
        return cache
    policy = replace(parse("full"), positions=cache.policy.positions, storage=cache.policy.storage)
    return replace(cache, policy=policy, kept=(None,) * len(cache.kept))


@jax.jit
def _joined(caches: Sequence[KVCache]) -> KVCache:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *caches).in_place()
