"""A layer over its own entries, and all layers in one program. Layers of a kind share a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.attend import Reading, Replaying, Stepping, attending_once, first, over_heads, twice
from kvjax.cache import Entries
from kvjax.mesh.experts import over_experts
from kvjax.models import Attend, AttentionLayer, Decoder, DecoderConfig, embedded


@dataclass(frozen=True)
class Call:
    """What is static about a call of one layer, or of all layers.

    Attributes:
        attention: of the call.
        mesh: where layers and entries lie; None is one device.
        doubled: whether each row runs `twice`.
    """

    attention: Reading | Replaying | Stepping
    mesh: Mesh | None
    doubled: bool = False

    def of_layers(self, first: int, count: int) -> Call:
        """The call of some layers over their own entries."""
        return replace(self, attention=self.attention.of_layers(first, count))

    def attend(self, **rows: Any) -> Attend:
        """The attention function for these arguments, arrays with axes [B, ...] or None."""
        hidden = self.attention.policy.score.needs.hidden
        attend = over_heads(self.mesh, self.attention, hidden=hidden, **rows)
        return attending_once(attend) if self.doubled else attend


def through_layers(
    params: Decoder, tokens: Int[Array, "B N"], entries: Entries, call: Call, **rows: Any
) -> tuple[Float[Array, "B N E"], Entries]:
    """The hidden states of tokens behind all layers, and the entries of the layers. It is called in a program.

    Args:
        rows: the arguments of `Call.attend`.
    """
    x = embedded(params.embed, twice(tokens) if call.doubled else tokens, params.config.embedding_scale)
    x, entries = through_some(params.layers, 0, x, entries, rows, facts=facts_of(params.config), call=call)
    return first(x) if call.doubled else x, entries


def through_some(
    layers: Sequence[Any],
    first: Int[ArrayLike, ""],
    x: Float[Array, "B N E"],
    entries: Entries,
    rows: dict[str, Any],
    *,
    facts: Sequence[AttentionLayer],
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries]:
    """The hidden states behind some layers, and their entries. It is called in a program.

    A layer is traced once for all that are alike and whose arrays have equal shapes. XLA inlines its calls.

    Args:
        first: the index of the first of these layers in the model.
        entries: of these layers.
        facts: of these layers, from `facts_of`.
        call: of these layers.
    """
    for i, (layer, own) in enumerate(zip(layers, facts, strict=True)):
        part = entries.of_layers(i, 1)
        x, part = _traced(layer, first + i, x, part, rows, facts=own, call=call.of_layers(i, 1))
        entries = entries.with_layers(i, part)
    return x, entries


def through_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B N E"],
    entries: Entries,
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries]:
    """The hidden states behind a layer, and its entries.

    Args:
        index: of the layer in the model.
        entries: of this layer alone.
        facts: of this layer, from `facts_of`.
        call: of this layer.
    """
    record = replace(facts, index=index, **layer.attention.weights)
    return layer(x, record, call.attend(**rows), entries, over_experts(call.mesh))


_traced = jax.jit(through_layer, static_argnames=("facts", "call"))


def facts_of(config: DecoderConfig) -> list[AttentionLayer]:
    """What is static about each layer, for a cache of that layer alone. Layers of a kind have equal facts."""
    nothing: Any = None
    return [
        AttentionLayer(0, config.rope_of(i), **config.logits_of(i), output=nothing, alone=True)
        for i in range(config.num_layers)
    ]
