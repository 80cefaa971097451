"""Reading the prompt of one request, a piece at a time, into a cache of the shape of a resident row.

All shapes follow from the class of the prompt's length alone, never from the prompt, so that all programs are known
before the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder, DecoderConfig
from kvjax.policy import Policy
from kvjax.reading.layers import logits_of, read
from kvjax.reading.prompt import Batch, Pieces, complete, pieces
from kvjax.runtime.clock import Run

from .plans import Plans
from .prefixes import PrefixStore

Read = tuple[Float[Array, "1 V"], KVCache]


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

    def add_all(self, *, after: bool) -> tuple[Any, KVCache]:
        """Adds the programs of prompts of every class, and returns the shapes of the logits and a row's cache.

        Args:
            after: whether to add those that read a question after a stored prefix.
        """
        sizes = self.plans.sizes
        for size in sizes.classes:
            logits, row = complete(self.prompt(np.zeros(size, np.int32)))
        for size in sizes.classes if after else ():
            if size <= sizes.chunk:
                self._question(np.zeros(size, np.int32), row)
        return logits, row

    def prompt(self, prompt: Int[np.ndarray, "N"]) -> Pieces[Read]:
        """Reads a prompt, and returns the logits and the row's cache."""
        batch = self._batch(prompt)
        cache = self.run(begun, self.put(batch.lengths), config=self.params.config, **self.plans.begin)
        plan = self.plans.of_class(self.plans.sizes.padded(prompt.size))
        return pieces(self.params, cache, batch, plan, self.plans.texts, run=self.run, put=self.put)

    def question(self, prompt: Int[np.ndarray, "N"], prefix: Int[np.ndarray, "N"], store: PrefixStore) -> Pieces[Read]:
        """Reads a question after a prefix, which is read first unless it is stored."""
        key = store.key(prefix)
        cache = store.get(key)
        if cache is None:
            _, cache = yield from self.prompt(prefix)
            for leaf in jax.tree.leaves(cache):
                leaf.copy_to_host_async()
            yield
            store.put(key, jax.tree.map(lambda x: fetch(x)[:1], cache))
        else:
            cache = self.plans.put_row(cache)
        return self._question(prompt, cache)

    def _question(self, prompt: Int[np.ndarray, "N"], cache: KVCache) -> Read:
        """The logits and the cache after a question, which changes the cache of a prefix in place."""
        batch = self._batch(prompt)
        plan = self.plans.after(batch.tokens.shape[1], cache)
        hidden, cache = read(self.params, cache, *map(self.put, batch.arrays), plan=plan, run=self.run, owned=True)
        return self.run(logits_of, self.params.head, hidden, mesh=self.plans.mesh), cache

    def _batch(self, prompt: Int[np.ndarray, "N"]) -> Batch:
        """A prompt for each part of the batch, padded to its class, or to whole chunks."""
        sizes = self.plans.sizes
        size = min(sizes.padded(prompt.size), sizes.chunks(prompt.size) * sizes.chunk)
        return Batch.of([prompt] * self.plans.batch, size)
