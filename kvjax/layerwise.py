"""Reading and replaying a prompt layer by layer: all layers of a kind share one program.

The programs of a deep model are therefore those of a shallow one, and a layer's activations are forgotten before the
next one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import ReadPlan, over_heads, positions_behind, reading, replaying
from kvjax.cache import Layers, Slots
from kvjax.clock import Run
from kvjax.kv_cache import KVCache
from kvjax.mix import over_experts
from kvjax.models import Attend, AttentionLayer, Decoder, embedded
from kvjax.policy import Pass, Policy
from kvjax.programs import jit
from kvjax.sharding import rows_sharding

DEEP = 8  # layers per kind, from which on a prompt is read layer by layer


def pays(params: Decoder, cache: KVCache, plan: ReadPlan) -> bool:
    """Whether `read_by_layers` compiles faster than `kvjax.extend.read`: on one CPU, if many layers are alike.

    XLA compiles each of the equal layers of one program. On accelerators a prompt stays one program, which the host
    starts once.
    """
    if not _on_one_cpu(cache):
        return False
    records = params.attention_layers
    limited = [cache.policy.limited(i) for i in range(len(records))]
    settled = plan.settled or plan.slots
    kinds = set(zip(map(facts_of, records), plan.slots, plan.kept, settled, limited, strict=True))
    return len(records) >= DEEP * len(kinds)


def layers_pay(params: Decoder, cache: KVCache) -> bool:
    """Whether programs of single layers compile faster, for what follows a prompt, than one of all layers."""
    if not _on_one_cpu(cache):
        return False
    kinds = set(zip(map(facts_of, params.attention_layers), cache.entries.bounds, strict=True))
    return len(params.attention_layers) >= DEEP * len(kinds)


def _on_one_cpu(cache: KVCache) -> bool:
    """Whether programs of single layers can be called with layers of slots, outside of another program."""
    traced = isinstance(cache.length, jax.core.Tracer)
    return jax.default_backend() == "cpu" and cache.mesh is None and not cache.entries.preallocates and not traced


def read_by_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan,
    run: Run,
) -> tuple[Float[Array, "B V"], KVCache]:
    """What `kvjax.extend.read` returns for a cache of one device. Arguments are those of `read_layers`."""
    found = list(read_layers(params, cache, tokens, lengths, plan=plan, run=run))
    logits = run(_logits, params, found[-1][0])
    entries, length = Layers(tuple(held for _, held in found)), cache.length + lengths
    return logits, replace(cache, entries=entries, length=length, filled=cache.filled or plan.final)


def read_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan | None,
    run: Run,
) -> Iterator[tuple[Float[Array, "B N E"], Slots]]:
    """The hidden states behind each layer, and its entries after up to N tokens per row have been appended.

    The hidden states are donated to the next layer when it is read.

    Args:
        tokens: right-aligned, on the devices of the cache.
        plan: as `reading` takes it.
    """
    scale = params.config.embedding_scale
    x, rows = run(_begin, params.embed, cache.length, tokens, lengths, scale=scale, mesh=cache.mesh)
    for i, (layer, record) in enumerate(zip(params.layers, params.attention_layers, strict=True)):
        own = None if plan is None else ReadPlan((plan.slots[i],), (plan.kept[i],), plan.final, plan.settled[i : i + 1])
        x, held = run(
            _read_layer,
            layer,
            i,
            x,
            cache.entries.layer(i, 0),
            rows | {"rope": cache.rope},
            facts=facts_of(record),
            policy=cache.policy,
            plan=own,
            mesh=cache.mesh,
        )
        yield x, held


def replay_by_layers(params: Decoder, cache: KVCache, part: Pass, *, run: Run) -> KVCache:
    """What `kvjax.replays.replay` returns for a cache of one device and a score that needs no gradients."""
    scale, records = params.config.embedding_scale, params.attention_layers
    x, rows = run(_begin, params.embed, cache.length, part.tokens, part.lengths, scale=scale, mesh=None)
    rows = {name: rows[name] for name in ("positions", "lengths")}
    rows |= {"first": part.first, "last": part.last, "rope": cache.rope}
    found = []
    for i, (layer, record) in enumerate(zip(params.layers, records, strict=True)):
        held, last = cache.entries.layer(i, 0), i == len(records) - 1
        x, (per_slot, per_row) = run(
            _replay_layer, layer, i, x, held, rows, facts=facts_of(record), policy=cache.policy, last=last
        )
        found.append(replace(held, per_slot=per_slot, per_row=per_row))
    return replace(cache, entries=Layers(tuple(found)))


def facts_of(record: AttentionLayer) -> AttentionLayer:
    """What layers of a kind have in common; static."""
    nothing: Any = None
    return replace(record, index=0, output=nothing, sinks=None, statistics=None, alone=True)


@partial(jit, static_argnames=("scale", "mesh"))
def _begin(
    embed: Any,
    length: Int[Array, "B"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N E"], dict[str, Array]]:
    """The first hidden states of tokens that extend rows of a length, and what attention has to know of them."""
    positions = positions_behind(length, lengths, tokens.shape[1])
    rows = {"positions": positions, "lengths": lengths, "next_position": length + lengths}
    return _in_rows(embedded(embed, tokens, scale), mesh), rows


@partial(jit, static_argnames=("facts", "policy", "plan", "mesh"), donate_argnames="x")
def _read_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B N E"],
    entries: Slots,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    policy: Policy,
    plan: ReadPlan | None,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N E"], Slots]:
    """The hidden states behind a layer, and its entries."""
    attend = over_heads(mesh, partial(reading, policy, plan=plan), hidden=policy.score.needs.hidden, **rows)
    x, held = _applied(layer, facts, index, x, entries, attend, mesh)
    return _in_rows(x, mesh), held


@partial(jit, static_argnames=("facts", "policy", "last"))
def _replay_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B W E"],
    entries: Slots,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    policy: Policy,
    last: bool,
) -> tuple[Float[Array, "B W E"] | None, tuple[Any, Any]]:
    """The hidden states of a pass behind a layer, unless it is the last, and the score's state of its entries."""
    attend = over_heads(None, partial(replaying, policy), hidden=policy.score.needs.hidden, **rows)
    x, held = _applied(layer, facts, index, x, entries, attend, None)
    return None if last else x, (held.per_slot, held.per_row)


def _applied(
    layer: Any,
    facts: AttentionLayer,
    index: Int[Array, ""],
    x: Float[Array, "B N E"],
    entries: Slots,
    attend: Attend,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N E"], Slots]:
    """The hidden states behind a layer that attends as given, and its entries."""
    record = replace(facts, index=index, **layer.attention.weights)
    x, after = layer(x, record, attend, Layers((entries,)), over_experts(mesh))
    return x, after.each[0]


@jit
def _logits(params: Decoder, hidden: Float[Array, "B N E"]) -> Float[Array, "B V"]:
    return params.logits(hidden[:, -1])


def _in_rows(x: Float[Array, "B N E"], mesh: Mesh | None) -> Float[Array, "B N E"]:
    return x if mesh is None else jax.lax.with_sharding_constraint(x, rows_sharding(mesh))
