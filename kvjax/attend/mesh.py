"""Attention and sampling on a mesh: each device works on its own rows and heads.

XLA's partitioner handles projections and MLP. It would move whole caches for a scatter or a top-k that it cannot prove
local, so attention and sampling run inside `jax.shard_map`, where they are local by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from kvjax.cache import Entries
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.mesh.sharding import DATA, MODEL, REPLICA, heads_axes
from kvjax.models import Attend, AttentionLayer

Rows = TypeVar("Rows")
Given = TypeVar("Given")
Changed = TypeVar("Changed")


def over_heads(mesh: Mesh | None, make: Callable[..., Attend], *, hidden: bool, **rows: Any) -> Attend:
    """Returns the attention function `make(**rows)`, on a mesh.

    Args:
        make: takes the rows, and as `heads=` the heads that a device holds.
        hidden: whether it reads hidden states, of which each device gets those of its rows, and gates.
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

    def attend(layer: AttentionLayer, q: Array, k: Array, v: Array, entries: Entries) -> tuple[Array, Entries]:
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(row, _weight_specs(mesh, layer), row, PartitionSpec(), query_head, kv_head, kv_head, kv_head),
            out_specs=(query_head, kv_head),
            check_vma=False,  # that replicas are equal is not for the compiler to prove
        )
        def local(
            rows: Any, weights: Any, hidden: Any, gates: Any, q: Array, k: Array, v: Array, part: Entries
        ) -> tuple[Array, Entries]:
            own = replace(layer, **weights, **hidden, gates=gates)
            return make(**rows, heads=heads)(own, q, k, v, part)

        read = {name: getattr(layer, name) if hidden else None for name in ("hidden", "residual")}
        return local(rows, layer.weights, read, layer.gates if hidden else None, q, k, v, entries)

    return attend


def over_layers(
    mesh: Mesh | None,
    change: Callable[..., Changed],
    records: Sequence[AttentionLayer],
    layers: Given,
    **rows: Any,
) -> Changed:
    """Runs `change(records, layers, **rows, heads=...)`, which sees all layers at once, on a mesh."""
    if mesh is None:
        return change(records, layers, **rows, heads=ALL_HEADS)
    row, kv_head = PartitionSpec(DATA), PartitionSpec(DATA, MODEL)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=([_weight_specs(mesh, record) for record in records], kv_head, row),
        out_specs=kv_head,
        check_vma=False,
    )
    def local(weights: list[Any], layers: Given, rows: Any) -> Changed:
        own = [replace(record, **held) for record, held in zip(records, weights, strict=True)]
        return change(own, layers, **rows, heads=heads_of(mesh))

    return local([record.weights for record in records], layers, rows)


def _weight_specs(mesh: Mesh, layer: AttentionLayer) -> dict[str, PartitionSpec]:
    """Returns the sharding of `AttentionLayer.weights`. Devices that share a kv head have its group's statistics."""
    query_head = PartitionSpec(heads_axes(mesh))
    return {name: PartitionSpec(MODEL) if name == "statistics" else query_head for name in layer.weights}


def heads_of(mesh: Mesh) -> Heads:
    """Returns the heads that a device of a mesh holds."""
    return Heads(
        kv_axis=MODEL if mesh.shape[MODEL] > 1 else None, group_axis=REPLICA if REPLICA in mesh.axis_names else None
    )


def over_rows(mesh: Mesh | None, change: Callable[[Rows, Any], Rows], state: Rows, *others: Any) -> Rows:
    """Runs `change(state, *others)` on a mesh. All arrays have axes [B, ...], and no row sees another."""
    if mesh is None:
        return change(state, *others)
    row = PartitionSpec(DATA)
    return jax.shard_map(change, mesh=mesh, in_specs=row, out_specs=row, check_vma=False)(state, *others)
