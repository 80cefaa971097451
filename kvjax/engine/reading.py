"""Reading a prompt, a piece at a time, into a cache of the shape of a resident row; or several short ones together.

All shapes follow from the number and the class of the prompts alone, never from the prompts, so that all programs are
known before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, DecoderConfig
from kvjax.policy import Policy
from kvjax.reading.layers import logits_of, read
from kvjax.reading.prompt import Batch, Pieces, complete, pieces
from kvjax.reading.room import free_room, grown
from kvjax.runtime.clock import Run

from .plans import Plans
from .stored import CacheStore, Stored


class Read(NamedTuple):
    """The result of reading requests, with which they are admitted. Each part of the batch has all of them.

    Attributes:
        logits: after the last token of each.
        cache: of their rows.
        cached: the number of tokens that a stored cache had seen, of the only request.
    """

    logits: Float[Array, "B V"]
    cache: KVCache
    cached: int = 0


@partial(jax.jit, static_argnames=("config", "policy", "size", "dtype", "mesh"))
def begun(
    lengths: Int[Array, "B"],
    *,
    config: DecoderConfig,
    policy: Policy,
    size: int,
    dtype: jnp.dtype,
    mesh: Mesh | None,
) -> KVCache:
    """A cache before its prompt, without slots."""
    cache = KVCache.empty(config, policy, lengths, size, dtype)
    return replace(cache, mesh=mesh).in_place()


@jax.jit
def copied(cache: KVCache) -> KVCache:
    """A copy of a cache, which may then change in place."""
    return jax.tree.map(jnp.copy, cache)


@dataclass(frozen=True)
class Reader:
    """Reads prompts, or adds the programs that read them.

    Attributes:
        plans: the static choices.
        params: the model.
        run: runs a program, as `Programs.call` does, or adds it, as `Programs.compile`.
        put: makes arrays of the host those that `run` takes: arrays, or shapes.
    """

    plans: Plans
    params: Decoder
    run: Run
    put: Callable[[Any], Any]

    def add_all(self, *, after: bool) -> dict[int, Read]:
        """Adds the programs of prompts of every class, and returns the shapes of a read by the number of its prompts.

        Args:
            after: whether to add those that read tokens after a stored cache.
        """
        sizes, found = self.plans.sizes, dict[int, Read]()
        for count, size in sizes.reads:
            found[count] = complete(self.prompts([np.zeros(size, np.int32)] * count))
        if after:
            row = found[1].cache
            self.run(free_room, row)
            if self.plans.device_memory:
                self.run(copied, row)
            for size in sizes.classes:
                if size <= sizes.padded(self.plans.most_after):
                    complete(self._after(np.zeros(size, np.int32), row))
        return found

    def prompts(self, prompts: Sequence[Int[np.ndarray, "_"]]) -> Pieces[Read]:
        """Reads a prompt, or several together in one chunk."""
        size = self.plans.sizes.class_of([prompt.size for prompt in prompts])
        batch, plan = self._batch(prompts, size), self.plans.of_class(len(prompts), size)
        cache = self.run(begun, self.put(batch.lengths), config=self.params.config, **self.plans.begin)
        return Read(*(yield from pieces(self.params, cache, batch, plan, self.plans.texts, run=self.run, put=self.put)))

    def question(self, prompt: Int[np.ndarray, "N"], prefix: Int[np.ndarray, "N"], store: CacheStore) -> Pieces[Read]:
        """Reads a question after a prefix, which is read first unless it is stored."""
        stored = store.get(prefix)
        if stored is not None:
            cache, cached = self.plans.put_row(stored.cache), prefix.size
            if stored.free is None:
                stored.free = self.run(free_room, cache)
        else:
            _, cache, cached = yield from self.prompts([prefix])
            stored = Stored(prefix.size, cache, self.run(free_room, cache))
            stored.start()
            yield
            stored.settle()
            store.put(store.key(prefix), stored)
        return (yield from self._after(prompt, cache))._replace(cached=cached)

    def continued(self, tokens: Int[np.ndarray, "N"], stored: Stored) -> Pieces[Read]:
        """Reads the tokens that follow those that a stored cache has seen."""
        cache = self.run(copied, stored.cache) if stored.stays else self.plans.put_row(stored.cache)
        read = yield from self._after(tokens[stored.length :], cache)
        return read._replace(cached=stored.length)

    def _after(self, tokens: Int[np.ndarray, "N"], row: KVCache) -> Pieces[Read]:
        """Reads tokens after those that a row has seen. Nobody else has the row, which changes in place."""
        plans, size = self.plans, self.plans.sizes.padded(tokens.size)
        *before, last = self._batch([tokens], size).chunks(plans.sizes.chunk)
        after, cache = plans.after(last.tokens.shape[1], row), row
        step = partial(read, self.params, run=self.run)
        if before:
            between = plans.between(size, row)
            cache = self.run(grown, cache, size=between.slots)
            for part in before:
                _, cache = step(cache, *map(self.put, part.arrays), plan=between, owned=True)
                yield
        hidden, cache = step(cache, *map(self.put, last.arrays), plan=after, owned=not before, last=True)
        return Read(self.run(logits_of, self.params.head, hidden, mesh=plans.mesh), cache)

    def _batch(self, prompts: Sequence[Int[np.ndarray, "_"]], size: int) -> Batch:
        """The prompts for each part of the batch, padded to their class, or to whole chunks."""
        sizes, longest = self.plans.sizes, max(prompt.size for prompt in prompts)
        return Batch.of([*prompts] * self.plans.batch, min(size, sizes.chunks(longest) * sizes.chunk))
