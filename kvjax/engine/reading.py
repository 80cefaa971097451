"""Reading the prompt of one request, a piece at a time, into a cache of the shape of a resident row.

All shapes follow from the class of the prompt's length alone, never from the prompt, so that all programs are known
before the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from kvjax.reading.batch import Batch
from kvjax.reading.prompt import Pieces, complete, pieces
from kvjax.reading.units import logits_of, read
from kvjax.runtime.clock import Run

from .compiling import Programs
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


def compile_reads(programs: Programs, plans: Plans, params: Decoder, *, after: bool) -> tuple[Any, KVCache]:
    """Adds the programs that read prompts of every class, and returns the shapes of the logits and a row's cache.

    Args:
        after: whether to add those that read a question after a stored prefix.
    """
    run, put = programs.compile, plans.shapes_of
    for size in plans.sizes.classes:
        logits, row = complete(_pieces(plans, params, np.zeros(size, np.int32), run=run, put=put))
    for size in plans.sizes.classes if after else ():
        if size <= plans.sizes.chunk:
            _read_after(plans, params, np.zeros(size, np.int32), row, run=run, put=put)
    return logits, row


def reading(programs: Programs, plans: Plans, params: Decoder, prompt: Int[np.ndarray, "N"]) -> Pieces[Read]:
    """Reads a prompt, and returns the logits and the row's cache."""
    return _pieces(plans, params, prompt, run=programs.call, put=plans.put_rows)


def _pieces(
    plans: Plans, params: Decoder, prompt: Int[np.ndarray, "N"], *, run: Run, put: Callable[[Any], Any]
) -> Pieces[Read]:
    batch = _batch(plans, prompt)
    cache = run(begun, put(batch.lengths), config=params.config, **plans.begin)
    plan = plans.of_class(plans.sizes.padded(prompt.size))
    return pieces(params, cache, batch, plan, plans.texts, run=run, put=put)


def reading_after(
    programs: Programs,
    plans: Plans,
    params: Decoder,
    prompt: Int[np.ndarray, "N"],
    prefix: Int[np.ndarray, "N"],
    store: PrefixStore,
) -> Pieces[Read]:
    """Reads a question after a prefix, which is read first unless it is stored."""
    key = store.key(prefix)
    cache = store.get(key)
    if cache is None:
        _, cache = yield from reading(programs, plans, params, prefix)
        for leaf in jax.tree.leaves(cache):
            leaf.copy_to_host_async()
        yield
        store.put(key, jax.tree.map(lambda x: fetch(x)[:1], cache))
    else:
        cache = plans.put_row(cache)
    return _read_after(plans, params, prompt, cache, run=programs.call, put=plans.put_rows)


def _read_after(
    plans: Plans,
    params: Decoder,
    prompt: Int[np.ndarray, "N"],
    cache: KVCache,
    *,
    run: Run,
    put: Callable[[Any], Any],
) -> Read:
    """The logits and the cache after a question, which changes the cache of a prefix in place."""
    batch = _batch(plans, prompt)
    plan = plans.after(batch.tokens.shape[1], cache)
    hidden, cache = read(params, cache, *map(put, batch.arrays), plan=plan, run=run, owned=True)
    return run(logits_of, params, hidden, mesh=plans.mesh), cache


def _batch(plans: Plans, prompt: Int[np.ndarray, "N"]) -> Batch:
    """A prompt for each part of the batch, padded to its class, or to whole chunks."""
    size = min(plans.sizes.padded(prompt.size), plans.sizes.chunks(prompt.size) * plans.sizes.chunk)
    return Batch.of([prompt] * plans.batch, size)
