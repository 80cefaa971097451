"""Reading a prompt layer by layer: all layers of a kind share one program, and each is compressed under many policies.

The programs of a deep model are therefore those of a shallow one, and a layer is forgotten before the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.allocate import Run
from kvjax.attend import ReadPlan, expired, finished, over_heads, over_layers, reading
from kvjax.cache import Layers, Slots
from kvjax.heads import Heads
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, Decoder
from kvjax.policy import LayerShape, Moment, Policy, Together
from kvjax.programs import jit
from kvjax.sharding import rows_sharding


@dataclass(frozen=True)
class End:
    """How a prompt ends under one policy.

    Attributes:
        policy: the policy.
        kept: the number of entries that each layer retains at most; None where it retains everything.
        slots: of each layer.
        final: whether the layers are compressed; otherwise they stay as they are, with the states of all scores.
    """

    policy: Policy
    kept: tuple[int | None, ...]
    slots: tuple[int, ...]
    final: bool

    def of_layer(self, i: int) -> End:
        """The end of one layer."""
        return replace(self, kept=(self.kept[i],), slots=(self.slots[i],))


def read_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan | None,
    run: Run,
) -> Iterator[Slots]:
    """Each layer of a cache after it has been extended by up to N tokens per row.

    Args:
        cache: read under the policy of `kvjax.prefill_each.reading_policy`.
        tokens: right-aligned, on the devices of the cache.
        plan: as `reading` takes it.
    """
    x, rows = run(_begin, params.embed, cache.length, tokens, lengths, mesh=cache.mesh)
    for i, (layer, record) in enumerate(zip(params.layers, params.attention_layers, strict=True)):
        own = None if plan is None else ReadPlan((plan.slots[i],), (plan.kept[i],), plan.final)
        x, held = run(
            _read_layer,
            layer,
            i,
            x,
            cache.entries.layer(i, 0),
            rows | {"rope": cache.rope},
            facts=replace(record, index=0, output=None, alone=True),
            policy=cache.policy,
            plan=own,
            mesh=cache.mesh,
        )
        yield held


def read_to_end(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    ends: Sequence[End],
    run: Run,
) -> list[Layers]:
    """The entries of a cache after its last tokens, under each of several policies, in their order.

    Args:
        cache, tokens, lengths, run: as `read_layers` takes them.
        ends: what becomes of the prompt under each policy.
    """
    layers = len(cache.entries)
    groups = _groups(ends)
    length = run(_added, cache.length, lengths)
    capacities = run(
        _capacities, length, policies=tuple(tuple(end.policy for end in group) for group in groups), layers=layers
    )
    rows = {"next_position": length, "rope": cache.rope}
    found: dict[End, list[Slots]] = {end: [] for end in ends}
    for i, held in enumerate(read_layers(params, cache, tokens, lengths, plan=None, run=run)):
        record = params.attention_layers[i]
        for group, capacity in zip(groups, capacities, strict=True):
            done = run(
                _compress_layer,
                record.output,
                i,
                held,
                rows | {"capacities": capacity[i]},
                facts=replace(record, index=0, output=None, alone=True),
                together=cache.policy.score,
                ends=tuple(end.of_layer(i) for end in group),
                mesh=cache.mesh,
            )
            for end, entries in zip(group, done, strict=True):
                found[end].append(entries)
    return [Layers(tuple(found[end])) for end in ends]


def _groups(ends: Sequence[End]) -> list[tuple[End, ...]]:
    """Ends that one program computes: those that are the same in all layers. Each of the others has its own programs."""
    alike = tuple(end for end in ends if len(set(zip(end.kept, end.slots, strict=True))) == 1)
    return [*([alike] if alike else []), *((end,) for end in ends if end not in alike)]


_added = jit(lambda length, lengths: length + lengths)


@partial(jit, static_argnames=("policies", "layers"))
def _capacities(
    lengths: Int[Array, "B"], *, policies: tuple[tuple[Policy, ...], ...], layers: int
) -> list[list[Int[Array, "B P"]]]:
    """The entries that a kv head retains under each of P policies, by group of policies and by layer."""
    return [
        [jnp.stack([policy.capacity(i, lengths, layers) for policy in group], axis=1) for i in range(layers)]
        for group in policies
    ]


@partial(jit, static_argnames="mesh")
def _begin(
    embed: Any, length: Int[Array, "B"], tokens: Int[Array, "B N"], lengths: Int[Array, "B"], *, mesh: Mesh | None
) -> tuple[Float[Array, "B N E"], dict[str, Array]]:
    """The first hidden states of tokens that extend rows of a length, and what attention has to know of them."""
    behind = jnp.arange(tokens.shape[1] - 1, -1, -1)
    next_position = length + lengths
    positions = jnp.where(behind < lengths[:, None], next_position[:, None] - 1 - behind, -1)
    rows = {"positions": positions, "lengths": lengths, "next_position": next_position}
    return _in_rows(embed[...][tokens], mesh), rows


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
    record = replace(facts, index=index, output=layer.attention.output[...])
    attend = over_heads(mesh, partial(reading, policy, plan=plan), **rows)
    x, after = layer(x, record, attend, Layers((entries,)))
    return _in_rows(x, mesh), after.each[0]


@partial(jit, static_argnames=("facts", "together", "ends", "mesh"))
def _compress_layer(
    output: Float[Array, "Hq D E"],
    index: Int[Array, ""],
    held: Slots,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    together: Together,
    ends: tuple[End, ...],
    mesh: Mesh | None,
) -> tuple[Slots, ...]:
    """A layer that has been read to the end of the prompt, under each of several policies."""
    change = partial(_compressed, together, ends)
    return over_layers(mesh, change, [replace(facts, index=index, output=output)], held, **rows)


def _compressed(
    together: Together,
    ends: Sequence[End],
    records: Sequence[AttentionLayer],
    held: Slots,
    next_position: Int[Array, "B"],
    rope: Float[Array, "B C/2"] | None,
    capacities: Int[Array, "B P"],
    heads: Heads,
) -> tuple[Slots, ...]:
    (record,) = records
    moment = Moment(next_position, record, rope, heads)
    held = expired(held, moment, next_position > 0)
    B, H = held.capacity.shape
    Hq, D, _ = record.output.shape
    shape = LayerShape(B, heads.whole_groups_of(Hq), H, D, record.output.dtype)
    found = []
    for p, end in enumerate(ends):
        (kept,), (slots,), policy = end.kept, end.slots, end.policy
        own, capacity = held, jnp.broadcast_to(capacities[:, p, None], (B, H))
        if end.final and kept is None:
            own = replace(held.without_state(), capacity=capacity)
        elif end.final:
            state = together.only(policy.score.observer, held)
            own = under(policy, state, capacity=capacity, merging=policy.merge.init(shape))
        found.append(finished(policy, own, moment, kept=kept, slots=slots, final=end.final))
    return tuple(found)


def under(policy: Policy, entries: Slots, *, capacity: Int[Array, "B H"], merging: Any) -> Slots:
    """A layer that has been read for several policies, as one of them has it before it compresses."""
    bias = jnp.zeros(entries.positions.shape, jnp.float32) if policy.merge.effects.bias else None
    return replace(entries, capacity=capacity, merging=merging, bias=bias)


def _in_rows(x: Float[Array, "B N E"], mesh: Mesh | None) -> Float[Array, "B N E"]:
    return x if mesh is None else jax.lax.with_sharding_constraint(x, rows_sharding(mesh))
