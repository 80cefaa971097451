"""What a cache will take, known before anything runs: shapes only, no arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache import KVCache
from kvjax.extend import bucket, plan_slots
from kvjax.models import DecoderConfig
from kvjax.policy import Policy
from kvjax.protocols import SharedBudget
from kvjax.ragged import RaggedCache
from kvjax.session import room_for
from kvjax.sharding import check_batch, fit_mesh, kv_replicas
from kvjax.sharing import lanes, pool_rows

Tree = TypeVar("Tree")


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
    """The cache that `generate` holds after prompts of `length` tokens and answers of up to `new_tokens`.

    Its arrays are shapes (`jax.ShapeDtypeStruct`), spread over the mesh if there is one; `nbytes` is exact. Prompts
    count with the padding of their bucket, answers with that of their room.

    Raises ValueError unless batch, length and new_tokens are at least 1, and the mesh fits batch and model.
    """
    check_sizes(batch=batch, length=length, new_tokens=new_tokens)
    mesh = None if mesh is None else fit_mesh(mesh, config)
    check_batch(batch, mesh)
    size = bucket(length)

    def read() -> KVCache:
        cache = KVCache.empty(config, policy, jnp.full(batch, length), size, dtype)
        room = room_for(new_tokens)
        if policy.shares:
            return _shared(cache, config, room)
        slots = plan_slots(cache, [0] * config.num_layers, new=size, room=room, compress=True)
        layers = [layer.grow(count) for layer, count in zip(cache.layers, slots, strict=True)]
        if policy.every is None:  # the prompt has been compressed, and no state is needed any more
            layers = [replace(layer, per_slot=None, per_row=None) for layer in layers]
        return replace(cache, layers=tuple(layers), filled=True)

    cache = replace(jax.eval_shape(read), mesh=mesh)
    return cache if mesh is None else spread(cache, cache.shardings)


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}; accepted is an integer >= 1")


def _shared(cache: KVCache, config: DecoderConfig, room: int) -> KVCache:
    """The cache once its policy's budget has been shared out."""
    layers = cache.layers
    if cache.policy.every is None:
        layers = tuple(replace(layer, per_slot=None, per_row=None) for layer in layers)
    budget = cache.policy.budget
    assert isinstance(budget, SharedBudget)
    rows = pool_rows(cache.policy, cache.kept, config.num_kv_heads, room)
    pool = RaggedCache.pack(layers, lanes(budget, config.num_kv_heads), rows, room)
    return replace(cache, layers=(), pool=pool, filled=True)


def bytes_per_device(cache: KVCache, config: DecoderConfig, *, data: int = 1, model: int = 1) -> int:
    """What each device of a mesh of data x model holds of a cache, which may be a plan. Exact.

    Rows are spread over `data` and kv heads over `model`; devices beyond the number of kv heads share them, and each
    then holds all of its kv head.

    Raises ValueError for a `model` that does not fit the model, or a batch that `data` does not divide.
    """
    if data < 1 or cache.batch_size % data:
        raise ValueError(f"data={data} for a batch of {cache.batch_size}; accepted is a divisor of the batch")
    return cache.nbytes // (data * model // kv_replicas(model, config))


def spread(shapes: Tree, shardings: Tree) -> Tree:
    """The same shapes (`jax.ShapeDtypeStruct`), of arrays that lie on the devices of their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
