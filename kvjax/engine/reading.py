"""Reading the prompt of one request, a unit of work at a time, into a cache of the shape of a resident row.

The units are those of `kvjax.reading.prompt.read_prompt`, with one difference: their shapes follow from the class of
the prompt's length alone, never from the prompt, so that all of them are known before the first request.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import ReadPlan
from kvjax.extend import jitted_read, read
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.reading.allocate import allocate, pool_rows
from kvjax.reading.prompt import read_on
from kvjax.reading.replays import passes, replay

from .compiling import Programs
from .plans import Plans, with_slots
from .prefixes import PrefixStore


@partial(jax.jit, static_argnames=("policy", "size", "slots", "mesh"))
def begun(
    params: Decoder,
    lengths: Int[Array, "B"],
    *,
    policy: Policy,
    size: int,
    slots: tuple[int, ...],
    mesh: Mesh | None,
) -> KVCache:
    """A cache before its prompt, with empty slots."""
    cache = KVCache.empty(params.config, policy, lengths, size, params.embed.dtype)
    return replace(with_slots(cache, slots), mesh=mesh).in_place()


@partial(jax.jit, static_argnames=("policy", "size", "plan", "mesh"))
def read_whole(
    params: Decoder,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    policy: Policy,
    size: int,
    plan: ReadPlan,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B V"], KVCache]:
    """The logits and the cache after a prompt that is read at once."""
    slots = (0,) * params.config.num_layers
    cache = begun(params, lengths, policy=policy, size=size, slots=slots, mesh=mesh)
    return read(params, cache, tokens, lengths, plan=plan)


def compile_reads(programs: Programs, plans: Plans, params: Decoder, *, after: bool) -> tuple[Any, KVCache]:
    """Adds the programs that read prompts of every class, and returns the shapes of the logits and a row's cache.

    Args:
        after: whether to add those that read a question after a stored prefix.
    """
    chunk = plans.sizes.chunk
    lengths = plans.shape(plans.batch)
    for size in plans.sizes.classes:
        last = plans.last(size)
        if size <= chunk:
            tokens = plans.shape(plans.batch, size)
            found = programs.add(("whole", size), read_whole, params, tokens, lengths, plan=last, **plans.begin)
        else:
            tokens, between = plans.shape(plans.batch, chunk), plans.between(size)
            cache = programs.add(("begin", size), begun, params, lengths, slots=between.slots, **plans.begin)
            cache = plans.placed(cache)
            programs.add(("chunk", size), read_on, params, cache, tokens, lengths, plan=between)
            found = programs.add(("last", size), jitted_read, params, cache, tokens, lengths, plan=last)
        logits, cache = found
        cache = plans.placed(cache)
        if plans.end.allocate:
            cache = _compile_allocation(programs, plans, params, cache, size)
    for size in plans.sizes.classes if after else ():
        if size <= chunk:
            tokens, plan = plans.shape(plans.batch, size), plans.after(size, cache)
            programs.add(("after", size), read_on, params, cache, tokens, lengths, plan=plan)
    return plans.placed_rows(logits), cache


def _compile_allocation(programs: Programs, plans: Plans, params: Decoder, cache: KVCache, size: int) -> KVCache:
    """Adds the programs that follow a prompt of a class, and returns the shapes of the row's cache after them."""
    tokens, lengths = plans.shape(plans.batch, size), plans.shape(plans.batch)
    for part in programs.add(("passes", size), passes, plans.policy.score, tokens, lengths, texts=plans.texts):
        part = jax.tree.map(plans.placed_rows, part)
        programs.add(("replay", size, part.tokens.shape), replay, params, cache, part)
    rows = pool_rows(plans.policy, plans.empty.kept, params.config.num_kv_heads, plans.sizes.room)
    allocated = programs.add(("allocate", size), allocate, params, cache, rows=rows, room=plans.sizes.room)
    return plans.placed(plans.bounded(allocated))


def reading(
    programs: Programs, plans: Plans, params: Decoder, prompt: Int[np.ndarray, "N"]
) -> Generator[None, None, tuple[Float[Array, "1 V"], KVCache]]:
    """Reads a prompt. It yields after each unit of work but the last, and returns the logits and the row's cache."""
    size, chunk, put = plans.sizes.padded(prompt.size), plans.sizes.chunk, plans.put_rows
    lengths = np.full(plans.batch, prompt.size, np.int32)
    padded = np.zeros((plans.batch, size), np.int32)
    padded[:, size - prompt.size :] = prompt
    if size <= chunk:
        logits, cache = programs.run(("whole", size), params, put(padded), put(lengths))
    else:
        cache = programs.run(("begin", size), params, put(lengths))
        for i in range(plans.sizes.chunks(prompt.size) - 1, 0, -1):
            part = np.clip(lengths - i * chunk, 0, chunk)
            end = size - i * chunk
            _, cache = programs.run(("chunk", size), params, cache, put(padded[:, end - chunk : end]), put(part))
            yield
        part = np.minimum(lengths, chunk)
        logits, cache = programs.run(("last", size), params, cache, put(padded[:, -chunk:]), put(part))
    if plans.end.allocate:
        for part in programs.run(("passes", size), put(padded), put(lengths)):
            yield
            cache = programs.run(("replay", size, part.tokens.shape), params, cache, part)
        yield
        cache = plans.bounded(programs.run(("allocate", size), params, cache))
    return logits, cache


def reading_after(
    programs: Programs,
    plans: Plans,
    params: Decoder,
    prompt: Int[np.ndarray, "N"],
    prefix: Int[np.ndarray, "N"],
    store: PrefixStore,
) -> Generator[None, None, tuple[Float[Array, "1 V"], KVCache]]:
    """Reads a question after a prefix, which is read first unless it is stored. It yields as `reading` does."""
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
    lengths = np.full(plans.batch, prompt.size, np.int32)
    padded = np.zeros((plans.batch, plans.sizes.padded(prompt.size)), np.int32)
    padded[:, padded.shape[1] - prompt.size :] = prompt
    put = plans.put_rows
    return programs.run(("after", padded.shape[1]), params, cache, put(padded), put(lengths))
