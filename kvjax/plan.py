"""The memory that a cache will take, known before anything runs: shapes only, no arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.attend import ReadPlan
from kvjax.cache import UNLIMITED, Entries, Layers, Slots, bucket, planned_pool, room_for
from kvjax.checkpoint.folder import DTYPE_NAMES, DTYPES
from kvjax.checks import check_type, checked_size, dtype_of, shown
from kvjax.kv_cache import KVCache
from kvjax.mesh.heads import ALL_HEADS
from kvjax.mesh.sharding import check_batch, fit_mesh, heads_sharding, kv_replicas, rows_sharding
from kvjax.models import DecoderConfig
from kvjax.policies import full
from kvjax.policy import Policy
from kvjax.policy.suits import check_is_policy
from kvjax.reading.allocate import laid_out, pool_rows
from kvjax.reading.room import plan_read
from kvjax.runtime.memory import tree_bytes
from kvjax.runtime.modes import own_modes

Tree = TypeVar("Tree")


@own_modes()
def plan_cache(
    config: DecoderConfig,
    policy: Policy,
    *,
    batch: int,
    length: int,
    new_tokens: int,
    dtype: Any,
    mesh: Mesh | None = None,
) -> KVCache:
    """The cache that `generate` holds after prompts of `length` tokens and answers of up to `new_tokens` tokens.

    Its arrays are shapes (`jax.ShapeDtypeStruct`), with shardings if there is a mesh; `nbytes` is exact. Prompts are
    padded to their bucket, and answers to their room.

    Args:
        batch: the number of rows.
        dtype: of keys and values: float32, bfloat16 or float16.
        mesh: of `make_mesh`.

    Raises:
        ValueError: for a batch, length or new_tokens that is not in 1 .. 2**31 - 1, for another dtype, and for a mesh
            that does not fit the batch and the model.
    """
    batch, length = checked_size("batch", batch), checked_size("length", length)
    new_tokens = checked_size("new_tokens", new_tokens)
    check_type("config", config, DecoderConfig)
    check_is_policy(policy)
    if dtype_of(dtype) not in DTYPES.values():  # of weights, and so of keys and values
        raise ValueError(f"dtype={shown(dtype)}: expected one of {DTYPE_NAMES}")
    dtype = dtype_of(dtype)
    mesh = None if mesh is None else fit_mesh(mesh, config)
    check_batch(batch, mesh)
    size = bucket(length)

    def read() -> KVCache:
        cache = KVCache.empty(config, policy, jnp.full(batch, length), size, dtype)
        room = room_for(new_tokens)
        return after_prompt(cache, config, new=size, room=room)

    cache = replace(jax.eval_shape(read), mesh=mesh)
    return cache if mesh is None else on_mesh(cache, mesh)


def after_prompt(cache: KVCache, config: DecoderConfig, *, new: int, room: int) -> KVCache:
    """An empty cache after its prompt of up to `new` tokens, with `room` slots for tokens to come; for `eval_shape`."""
    policy = cache.policy
    if policy.allocates:
        kept = (UNLIMITED,) * config.num_layers
        return replace(cache, entries=_allocated(cache, config, room), kept=kept, filled=True)
    plan = plan_read(cache, cache.entries.bounds, new=new, room=room, compress=True, final=True)
    entries = (_settled(cache, config, plan) if plan.settled else cache.entries).grow(plan.slots)
    if policy.every is None:  # the prompt has been compressed, and no state is needed any more
        entries = Layers(tuple(layer.without_state() for layer in entries))
    return replace(cache, entries=entries, filled=True)


def full_bytes(cache: KVCache, config: DecoderConfig, length: int, new_tokens: int) -> int:
    """The bytes of a cache of the policy `full` for the rows of a cache, of up to `length` tokens before an answer.

    They are the cache's own if it is full, however it has grown.
    """
    if cache.policy == full():
        return cache.nbytes
    plan = plan_cache(config, full(), batch=cache.batch_size, length=length, new_tokens=new_tokens, dtype=cache.dtype)
    return plan.nbytes


def _settled(cache: KVCache, config: DecoderConfig, plan: ReadPlan) -> Entries:
    """The entries once the policy's storage has settled a prompt."""

    def settled(i: int, layer: Slots, most: int | None) -> Slots:
        return layer if most is None else cache.policy.storage.settle(layer.grow(most), **config.logits_of(i))

    return Layers(tuple(map(settled, range(len(plan.settled)), cache.entries, plan.settled)))


def _allocated(cache: KVCache, config: DecoderConfig, room: int) -> Entries:
    """The entries once the policy's budget has been allocated."""
    policy = cache.policy
    layers = tuple(layer.without_state() if policy.every is None else layer for layer in cache.entries)
    lanes, growing = laid_out(policy, config.num_layers, config.num_kv_heads, ALL_HEADS)
    return planned_pool(layers, lanes=lanes, rows=pool_rows(cache, room), room=room, growing=growing)


def bytes_per_device(cache: KVCache, config: DecoderConfig, *, data: int = 1, model: int = 1) -> int:
    """The exact bytes of a cache, which may be a plan, that each device of a mesh of data x model holds.

    Rows are cut over `data` and kv heads over `model`. Devices beyond the number of kv heads hold copies: each holds
    all of its kv head. The states of recurrent layers are cut over `data` alone.

    Raises:
        ValueError: for a `model` that does not fit the model, or a `data` that does not divide the batch.
    """
    if data < 1 or cache.batch_size % data:
        raise ValueError(f"data={data} for a batch of {cache.batch_size}: expected a divisor of the batch")
    states = tree_bytes(cache.recurrent)
    return (cache.nbytes - states) // (data * model // kv_replicas(model, config)) + states // data


def placed(shapes: Tree, shardings: Tree) -> Tree:
    """The same shapes (`jax.ShapeDtypeStruct`) with shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def on_mesh(shapes: Tree, mesh: Mesh) -> Tree:
    """The same shapes where they lie on a mesh: entries by rows and kv heads, all others by rows."""
    rows, heads = rows_sharding(mesh), heads_sharding(mesh)

    def has_heads(x: Any) -> bool:
        return isinstance(x, Entries | Slots)

    def lying(x: Any) -> Any:
        return placed(x, jax.tree.map(lambda _: heads if has_heads(x) else rows, x))

    return jax.tree.map(lying, shapes, is_leaf=has_heads)
