"""Attention and sampling on a mesh: each device works on its own rows and heads, and nothing is moved unasked.

XLA's partitioner, to which projections and MLP are left, moves whole caches for a scatter or a top-k that it cannot
prove local. So both run inside `jax.shard_map`, where they are local by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from kvjax.cache import LayerCache
from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import Attend, AttentionLayer
from kvjax.ragged import RaggedCache
from kvjax.sharding import DATA, MODEL, REPLICA, heads_axes

Rows = TypeVar("Rows")
Entries: TypeAlias = tuple[LayerCache, ...] | RaggedCache
Changed = TypeVar("Changed", tuple[LayerCache, ...], RaggedCache)


def over_heads(mesh: Mesh | None, make: Callable[..., Attend], **rows: Any) -> Attend:
    """`make(**rows)`, an attention function, over a mesh.

    Args:
        make: takes the rows, and as `heads=` those that a device holds.
        rows: arrays with axes [B, ...], or None.
    """
    if mesh is None:
        return make(**rows)
    heads = heads_of(mesh)
    row, kv_head, query_head = (
        PartitionSpec(DATA),
        PartitionSpec(DATA, MODEL),
        PartitionSpec(DATA, heads_axes(mesh)),
    )
    output_head = PartitionSpec(heads_axes(mesh))

    def attend(layer: AttentionLayer, q: Array, k: Array, v: Array, cache: Entries) -> tuple[Array, Entries]:
        i = layer.index

        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(row, output_head, query_head, kv_head, kv_head, kv_head),
            out_specs=(query_head, kv_head),
            check_vma=False,  # that replicas are equal is not for the compiler to prove
        )
        def local(
            rows: Any, output: Array, q: Array, k: Array, v: Array, entries: LayerCache | RaggedCache
        ) -> tuple[Array, LayerCache | RaggedCache]:
            own = make(**rows, heads=heads)
            whole = (*cache[:i], entries) if isinstance(cache, tuple) else entries
            context, changed = own(replace(layer, output=output), q, k, v, whole)
            return context, changed[i] if isinstance(changed, tuple) else changed

        if isinstance(cache, RaggedCache):
            return local(rows, layer.output, q, k, v, cache)
        context, entries = local(rows, layer.output, q, k, v, cache[i])
        return context, (*cache[:i], entries, *cache[i + 1 :])

    return attend


def over_layers(
    mesh: Mesh | None,
    change: Callable[..., Changed],
    records: Sequence[AttentionLayer],
    layers: tuple[LayerCache, ...],
    **rows: Any,
) -> Changed:
    """`change(records, layers, **rows, heads=...)`, which looks at all layers at once, over a mesh."""
    if mesh is None:
        return change(records, layers, **rows, heads=ALL_HEADS)
    row, kv_head = PartitionSpec(DATA), PartitionSpec(DATA, MODEL)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(heads_axes(mesh)), kv_head, row),
        out_specs=kv_head,
        check_vma=False,
    )
    def local(outputs: list[Array], layers: tuple[LayerCache, ...], rows: Any) -> Changed:
        own = [replace(record, output=output) for record, output in zip(records, outputs, strict=True)]
        return change(own, layers, **rows, heads=heads_of(mesh))

    return local([record.output for record in records], layers, rows)


def heads_of(mesh: Mesh) -> Heads:
    """The heads that each device of a mesh holds."""
    return Heads(
        kv_axis=MODEL if mesh.shape[MODEL] > 1 else None, group_axis=REPLICA if REPLICA in mesh.axis_names else None
    )


def over_rows(mesh: Mesh | None, change: Callable[[Rows, Any], Rows], state: Rows, *others: Any) -> Rows:
    """`change(state, *others)`, of which every array has axes [B, ...] and no row looks at another, over a mesh."""
    if mesh is None:
        return change(state, *others)
    row = PartitionSpec(DATA)
    return jax.shard_map(change, mesh=mesh, in_specs=row, out_specs=row, check_vma=False)(state, *others)
