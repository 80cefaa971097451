"""Reading and replaying a prompt layer by layer: all layers of a kind share one program.

The programs of a deep model are therefore those of a shallow one, and a layer's activations are forgotten before the
next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import Reading, ReadPlan, Replaying, positions_behind
from kvjax.cache import Entries, Layers, Slots
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import rows_sharding
from kvjax.models import AttentionLayer, Decoder, embedded
from kvjax.policy import Pass
from kvjax.reading.each_layer import Call, facts_of, through_layer
from kvjax.runtime.clock import Run

DEEP = 8  # layers per kind, from which on a prompt is read layer by layer


def pays(params: Decoder, cache: KVCache, plan: ReadPlan) -> bool:
    """Whether `read_by_layers` compiles faster than `kvjax.extend.read`: on one CPU, if many layers are alike.

    XLA compiles each of the equal layers of one program. On accelerators a prompt stays one program, which the host
    starts once.
    """
    if not _on_one_cpu(cache):
        return False
    records = params.attention_layers
    limited = cache.policy.limits(len(records)).limited
    kinds = set(zip(map(facts_of, records), limited, plan.slots, plan.kept, plan.settled or plan.slots, strict=True))
    return len(records) >= DEEP * len(kinds)


def layers_pay(params: Decoder, cache: KVCache) -> bool:
    """Whether programs of single layers compile faster, for what follows a prompt, than one of all layers."""
    if cache.entries.preallocates or not _on_one_cpu(cache):
        return False
    kinds = set(zip(map(facts_of, params.attention_layers), cache.entries.bounds, strict=True))
    return len(params.attention_layers) >= DEEP * len(kinds)


def _on_one_cpu(cache: KVCache) -> bool:
    """Whether programs of single layers can be called, outside of another program."""
    return jax.default_backend() == "cpu" and cache.mesh is None and not isinstance(cache.length, jax.core.Tracer)


def read_by_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan,
    run: Run,
) -> tuple[Float[Array, "B V"], KVCache]:
    """What `kvjax.extend.read` returns for a cache of one device. Arguments are those of `read_layers`.

    A pool passes through all programs, each of which changes it in place. The first is given a copy.
    """
    entries = jax.tree.map(jnp.array, cache.entries) if cache.entries.preallocates else cache.entries
    read, x, rows = _reader(params, cache, tokens, lengths, plan=plan, run=run)
    for i in range(len(params.layers)):
        x, part = read(i, x, entries.alone(i))
        entries = entries.with_alone(i, part)
    logits = run(_logits, params, x)
    return logits, replace(cache, entries=entries, length=rows["next_position"], filled=cache.filled or plan.final)


def read_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan | None,
    run: Run,
) -> Iterator[Slots]:
    """The entries of each layer of slots after up to N tokens per row have been appended, one layer after another.

    Args:
        tokens: right-aligned, on the devices of the cache.
        plan: as `Reading` has it.
    """
    read, x, _ = _reader(params, cache, tokens, lengths, plan=plan, run=run)
    for i in range(len(params.layers)):
        x, part = read(i, x, cache.entries.alone(i))
        yield part.layer(0, 0)


def _reader(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan | None,
    run: Run,
) -> tuple[Callable[[int, Array, Entries], tuple[Array, Entries]], Float[Array, "B N E"], dict[str, Array]]:
    """What reads a layer: the hidden states behind it, and its entries. And what `_begin` returns.

    The hidden states that a layer is given are donated, and so is a pool.
    """
    go = _read_pool if cache.entries.preallocates else _read_slots
    scale, facts = params.config.embedding_scale, [facts_of(record) for record in params.attention_layers]
    call = Call(Reading(cache.policy, cache.policy.limits(len(facts)), plan), cache.mesh)
    x, rows = run(_begin, params.embed, cache.length, tokens, lengths, scale=scale, mesh=cache.mesh)

    def read(i: int, x: Array, entries: Entries) -> tuple[Array, Entries]:
        return run(
            go,
            params.layers[i],
            i,
            x,
            entries,
            rows | {"rope": cache.rope},
            facts=facts[i],
            call=call.of_layer(i),
        )

    return read, x, rows


def replay_by_layers(params: Decoder, cache: KVCache, part: Pass, *, run: Run) -> KVCache:
    """What `kvjax.reading.replays.replay` returns for a cache of one device and a score that needs no gradients."""
    scale, records = params.config.embedding_scale, params.attention_layers
    x, rows = run(_begin, params.embed, cache.length, part.tokens, part.lengths, scale=scale, mesh=None)
    rows = {name: rows[name] for name in ("positions", "lengths")}
    rows |= {"first": part.first, "last": part.last, "rope": cache.rope}
    found, call = [], Call(Replaying(cache.policy), None)
    for i, (layer, record) in enumerate(zip(params.layers, records, strict=True)):
        held, last = cache.entries.layer(i, 0), i == len(records) - 1
        x, (per_slot, per_row) = run(
            _replay_layer, layer, i, x, held, rows, facts=facts_of(record), call=call, last=last
        )
        found.append(replace(held, per_slot=per_slot, per_row=per_row))
    return replace(cache, entries=Layers(tuple(found)))


@partial(jax.jit, static_argnames=("scale", "mesh"))
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


def _read_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B N E"],
    entries: Entries,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries]:
    """The hidden states behind a layer, and its entries."""
    x, after = through_layer(layer, index, x, entries, rows, facts=facts, call=call)
    return _in_rows(x, call.mesh), after


STATIC = ("facts", "call")
_read_slots = jax.jit(_read_layer, static_argnames=STATIC, donate_argnames="x")
_read_pool = jax.jit(_read_layer, static_argnames=STATIC, donate_argnames=("x", "entries"))


@partial(jax.jit, static_argnames=("facts", "call", "last"))
def _replay_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B W E"],
    entries: Slots,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
    last: bool,
) -> tuple[Float[Array, "B W E"] | None, tuple[Any, Any]]:
    """The hidden states of a pass behind a layer, unless it is the last, and the score's state of its entries."""
    x, after = through_layer(layer, index, x, Layers((entries,)), rows, facts=facts, call=call)
    held = after.layer(0, 0)
    return None if last else x, (held.per_slot, held.per_row)


@jax.jit
def _logits(params: Decoder, hidden: Float[Array, "B N E"]) -> Float[Array, "B V"]:
    return params.logits(hidden[:, -1])


def _in_rows(x: Float[Array, "B N E"], mesh: Mesh | None) -> Float[Array, "B N E"]:
    return x if mesh is None else jax.lax.with_sharding_constraint(x, rows_sharding(mesh))
