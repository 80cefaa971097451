"""The end of a prompt that is read for many policies: each layer that has been read is compressed under all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import ReadPlan, expired, finished, met_keys, over_layers
from kvjax.cache import Layers, Slots
from kvjax.kv_cache import KVCache
from kvjax.mesh.heads import Heads
from kvjax.mesh.sharding import fetch
from kvjax.models import AttentionLayer, Decoder
from kvjax.policy import LayerShape, Moment, Policy, Together

from .layers import States, facts_of, read_layers
from .widening import resized

MOST = 18  # ends that one program computes; the time to compile a program grows faster than its length


@dataclass(frozen=True)
class End:
    """The end of a prompt under one policy.

    Attributes:
        policy: the policy.
        plan: of the last chunk. Unless it is final, the layers stay as they are, with the states of all scores.
    """

    policy: Policy
    plan: ReadPlan

    @property
    def alike(self) -> bool:
        """Tells whether all layers end alike, so that one program serves them."""
        plan = self.plan
        return len(set(zip(plan.kept, plan.slots, plan.settled or plan.slots, strict=True))) == 1

    def widened(self) -> End:
        """Gives all layers the largest layer's size, if what is retained does not depend on the size."""
        plan, limits = self.plan, [most for most in self.plan.kept if most is not None]
        if not self.policy.ignores_size or len(limits) < len(plan.kept) or plan.settled:
            return self
        wide = replace(plan, kept=(max(limits),) * len(limits), slots=(max(plan.slots),) * len(limits))
        return End(self.policy, wide)

    def of_layer(self, i: int) -> End:
        """Returns the end of one layer."""
        return End(self.policy, self.plan.of_layers(i, 1))


def read_to_end(
    params: Decoder,
    cache: KVCache,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[np.ndarray, "B"],
    *,
    together: Together,
    ends: Sequence[End],
) -> tuple[list[Layers], States]:
    """Returns the entries of a cache after its last tokens, under each of several policies, in their order.

    It also returns the states of recurrent layers, which no policy changes.

    Args:
        cache: before them.
        tokens: right-aligned, on the host.
        together: the scores that observe the prompt.
        ends: what becomes of the prompt under each policy.
    """
    length = fetch(cache.length) + lengths
    groups = _groups(ends)
    rows = {"next_position": cache.put_rows(length), "rope": cache.rope}
    found: dict[End, list[Slots]] = {end: [] for end in ends}
    read = read_layers(params, cache, cache.put_rows(tokens), cache.put_rows(lengths))
    recurrent = []
    for i, (layer, facts, (held, states)) in enumerate(zip(params.layers, facts_of(params.config), read, strict=True)):
        recurrent.append(states)
        for group, wide in groups:
            capacities = np.stack([end.policy.capacity(i, length, len(cache.entries)) for end in group], axis=1)
            compressed = _compress_layer(
                layer.attention,
                i,
                held,
                rows | {"capacities": cache.put_rows(capacities)},
                facts=facts,
                together=together,
                ends=tuple(end.of_layer(i) for end in wide),
                mesh=cache.mesh,
            )
            for end, entries in zip(group, compressed, strict=True):
                found[end].append(entries)
    each = [(end.plan.slots, Layers(tuple(found[end]))) for end in ends]
    fitting = [layers if layers.bounds == slots else resized(layers, slots=slots) for slots, layers in each]
    return fitting, tuple(recurrent)


def _groups(ends: Sequence[End]) -> list[tuple[list[End], list[End]]]:
    """Groups policies that one program can compress. XLA shares their common work.

    An end that differs between layers has a group of its own, whose program is compiled for each kind of layer.
    """
    pairs = [(end, end.widened()) for end in ends]
    alike, others = ([pair for pair in pairs if pair[1].alike is same] for same in (True, False))
    groups = [alike[i : i + MOST] for i in range(0, len(alike), MOST)] + [[pair] for pair in others]
    return [([end for end, _ in group], [wide for _, wide in group]) for group in groups]


@partial(jax.jit, static_argnames=("facts", "together", "ends", "mesh"))
def _compress_layer(
    attention: Any,
    index: Int[Array, ""],
    held: Slots,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    together: Together,
    ends: tuple[End, ...],
    mesh: Mesh | None,
) -> tuple[Slots, ...]:
    """Returns a layer that has been read to the end of the prompt, under each of several policies."""
    change = partial(_compressed, together, ends)
    return over_layers(mesh, change, [replace(facts, index=index, **attention.weights)], held, **rows)


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
    whole = held
    held = expired(held, moment, next_position > 0)
    B, H = held.capacity.shape
    Hq, D, _ = record.output.shape
    shape = LayerShape(B, heads.whole_groups_of(Hq), H, D, record.output.dtype, record.output.shape[-1])
    found = []
    for p, end in enumerate(ends):
        policy, final, (kept,) = end.policy, end.plan.final, end.plan.kept
        own, capacity = held, jnp.broadcast_to(capacities[:, p, None], (B, H))
        if final and kept is None:
            own = replace(held.without_state(), capacity=capacity, storing=held.storing)
        elif final:
            state = together.only(policy.score, held)
            own = under(policy, state, capacity=capacity, merging=policy.merge.init(shape))
        met = None if kept is None else met_keys(policy, whole, moment)
        found.append(finished(policy, own, moment, met, end.plan, 0))
    return tuple(found)


def under(policy: Policy, entries: Slots, *, capacity: Int[Array, "B H"], merging: Any) -> Slots:
    """Returns a layer that was read for several policies in the form that one of them has before it compresses."""
    bias = jnp.zeros(entries.positions.shape, jnp.float32) if policy.merge.effects.bias else None
    return replace(entries, capacity=capacity, merging=merging, bias=bias)
