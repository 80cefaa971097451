"""Runs tokens through a model's layers: a prompt in a program per kind of layer, a decode step in one program.

The host starts the programs of a prompt one after the other: the first hidden states, the layers, the logits. The
programs of a deep model are therefore those of a shallow one, and the activations of a layer are forgotten before the
next one runs. Inside a caller's `jax.jit` they are parts of the caller's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend import Borrowing, Reading, ReadPlan, Stepping, positions_behind
from kvjax.cache import Entries, Slots
from kvjax.kv_cache import KVCache
from kvjax.mesh.experts import over_experts
from kvjax.models import AttentionLayer, Decoder, DecoderConfig, Embedding, Head, RecurrentState, of_layer
from kvjax.pallas_kernels import shared
from kvjax.runtime.clock import Run, run_at_once

from .call import Call, by_row, in_rows
from .readers import last_tokens, through_readers
from .widening import Widths

States: TypeAlias = tuple[tuple[RecurrentState, ...], ...]
"""The states of the recurrent layers before each of some layers."""
# A program of a GPU reads so many tokens of all rows and layers together, unless it then has more layers than these.
# With one layer for 512 tokens an H100 answers 0.81 of the tokens per second.
TOKENS, MOST_LAYERS = 4096, 8


def through_some(
    layers: Sequence[Any],
    first: Int[ArrayLike, ""],
    x: Float[Array, "B N E"],
    given: Float[Array, "B N L P"] | None,
    entries: Entries,
    recurrent: States,
    rows: dict[str, Any],
    *,
    facts: Sequence[AttentionLayer],
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries, States, tuple[Entries, ...]]:
    """Returns the hidden states behind some layers, their entries and their states. It is called in a program.

    It also returns the entries that the queries of each layer that lends met. A layer is traced once for all that are
    alike and whose arrays have equal shapes. XLA inlines its calls.

    Args:
        first: the index of the first of these layers in the model.
        given: the inputs of all layers of the model, where layers have them.
        entries: of these layers.
        recurrent: the states of the recurrent layers before each of these layers.
        facts: of these layers, from `facts_of`.
        call: of these layers.
    """
    states, lent = [], []
    for i, (layer, own) in enumerate(zip(layers, facts, strict=True)):
        part = entries.of_layers(i, 1)
        held = part, recurrent[i]
        x, part, state = _traced(layer, first + i, x, given, *held, rows, facts=own, call=call.of_layers(i, 1))
        if own.lends:
            part, met = part
            lent.append(met)
        entries = entries.with_layers(i, part)
        states.append(state)
    return x, entries, tuple(states), tuple(lent)


def through_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B N E"],
    given: Float[Array, "B N L P"] | None,
    entries: Entries,
    states: tuple[RecurrentState, ...],
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
) -> tuple[Float[Array, "B N E"], Any, tuple[RecurrentState, ...]]:
    """Returns the hidden states behind a layer, its entries, and the states of the recurrent layers before it.

    If the layer lends, a pair is in the place of its entries, as `AttentionLayer` describes it.

    Args:
        index: of the layer in the model.
        given: the inputs of all layers of the model, where layers have them.
        entries: of this layer alone.
        states: of the recurrent layers before this layer.
        facts: of this layer, from `facts_of`.
        call: of this layer.
    """
    record, mix = replace(facts, index=index, **layer.attention.weights), over_experts(call.mesh)
    x, states = layer.recur(x, lengths_of(rows), states, mix)
    x, entries = layer(x, record, call.attend(**rows), entries, mix, of_layer(given, index))
    return x, entries, states


def lengths_of(rows: dict[str, Any]) -> Int[Array, "B"]:
    """Returns the number of tokens that a call reads of each row: those of a prompt, or one if a token is incoming."""
    return rows["lengths"] if "lengths" in rows else rows["incoming"].astype(jnp.int32)


_traced = jax.jit(through_layer, static_argnames=("facts", "call"))


def facts_of(config: DecoderConfig) -> list[AttentionLayer]:
    """Returns the static facts of each layer, for a cache of that layer alone. Layers of a kind have equal facts."""
    nothing: Any = None
    return [
        AttentionLayer(0, config.rope_of(i), **config.logits_of(i), output=nothing, alone=True)
        for i in range(config.num_layers)
    ]


def read(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan,
    run: Run = run_at_once,
    owned: bool = False,
    last: bool = False,
) -> tuple[Float[Array, "B _ E"], KVCache]:
    """Extends a cache by up to N tokens per row, with every static choice made.

    Args:
        tokens: right-aligned, on the devices of the cache.
        run: how programs are run.
        owned: whether nobody else has the cache, which then changes in place. Its layers must keep their shapes.
        last: whether logits follow, for which the last token runs through the readers of a model, too.

    Returns:
        The hidden states behind the last layer, of which `logits_of` takes the last column, and the new cache.
    """
    entries = cache.entries
    if entries.preallocates and not owned:  # each layer changes the pool in place
        entries, owned = jax.tree.map(jnp.array, entries), True
    reader = _Reader(params, cache, tokens, lengths, plan=plan, run=run, in_place=owned, lends=last)
    at_once, layers = layers_at_once(tokens.size, cache.mesh), len(params.layers)
    recurrent: list[tuple[RecurrentState, ...]] = []
    for first in range(0, layers, at_once):
        part, states = reader.layers(first, entries.of_layers(first, min(at_once, layers - first)))
        entries = entries.with_layers(first, part)
        recurrent += states
    after = replace(cache, entries=entries, recurrent=tuple(recurrent), length=reader.rows["next_position"])
    hidden = reader.behind() if last and params.config.sources else reader.hidden
    return hidden, replace(after, filled=cache.filled or plan.final)


def read_layers(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], lengths: Int[Array, "B"]
) -> Iterator[tuple[Slots, tuple[RecurrentState, ...]]]:
    """Reads up to N tokens per row into layers of slots, one after another, and leaves each as it has attended.

    It returns each layer's entries, and the states of the recurrent layers before it.

    Args:
        tokens: right-aligned, on the devices of the cache.
    """
    reader = _Reader(params, cache, tokens, lengths, plan=None, run=run_at_once)
    for i in range(len(params.layers)):
        part, (states,) = reader.layers(i, cache.entries.of_layers(i, 1))
        yield part.layer(0, 0), states


class _Reader:
    """Tokens on their way through the layers.

    Attributes:
        hidden: the hidden states behind the last layer that was read; its program donates those before it.
        rows: the arrays of each row that attention takes.
    """

    def __init__(
        self,
        params: Decoder,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        lengths: Int[Array, "B"],
        *,
        plan: ReadPlan | None,
        run: Run,
        in_place: bool = False,
        lends: bool = False,
    ) -> None:
        self._params, self._layers, self._run = params, params.layers, run
        sources = params.config.sources if lends else ()
        self._facts = [replace(own, lends=i in sources) for i, own in enumerate(facts_of(params.config))]
        self._lent: list[Entries] = []
        self._widths = None if plan is None else Widths.of(cache.policy, cache.entries, plan, self._facts)
        wide = None if self._widths is None else self._widths.wide
        self._call = Call(Reading(cache.policy, cache.policy.limits(len(self._facts)), wide), cache.mesh)
        self._program = read_in_place if in_place else read_some
        self.hidden, self._given, self.rows = run(
            begin, params.embedding, cache.length, tokens, lengths, mesh=cache.mesh
        )
        self._rope, self._recurrent = cache.rope, cache.recurrent

    def layers(self, first: int, entries: Entries) -> tuple[Entries, States]:
        """Reads the layers that come next, to which these entries belong, and returns their entries and states."""
        rows, some = self.rows | {"rope": self._rope}, slice(first, first + len(entries))
        static = {"facts": tuple(self._facts[some]), "call": self._call.of_layers(first, len(entries))}
        if self._widths is not None:
            entries = self._widths.widen(entries, some, self._run)
        arrays = self.hidden, self._given, entries, self._recurrent[some], rows
        layers = self._layers[some], np.int32(first)
        self.hidden, part, states, lent = self._run(self._program, *layers, *arrays, **static)
        self._lent += lent
        return part if self._widths is None else self._widths.narrow(part, some, self._run), states

    def behind(self) -> Float[Array, "B 1 E"]:
        """Returns the hidden states of the last token behind the readers, once all layers have been read."""
        params, mesh = self._params, self._call.mesh
        x, given, rows = self._run(last_tokens, self.hidden, self._given, self.rows, mesh=mesh)
        entries = dict(zip(sorted(set(params.config.sources)), self._lent, strict=True))
        call, rows = Call(Borrowing(self._call.attention.policy), mesh), rows | {"rope": self._rope}
        facts = facts_of(params.config)
        return through_readers(params, x, given, entries, rows, facts=facts, call=call, run=self._run)


def layers_at_once(tokens: int, mesh: Mesh | None) -> int:
    """Returns the number of layers per program for a number of tokens: 1, or on a GPU several up to TOKENS in all.

    With fewer tokens per program, a GPU would wait for the host to start the next program.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return min(max(1, TOKENS // tokens), MOST_LAYERS) if platform == "gpu" else 1


@partial(jax.jit, static_argnames="mesh")
def begin(
    embedding: Embedding,
    length: Int[Array, "B"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N E"], Float[Array, "B N L P"] | None, dict[str, Array]]:
    """Returns what layers take of tokens that extend rows of a length, and the rows' arrays for attention."""
    positions = positions_behind(length, lengths, tokens.shape[1])
    rows = {"positions": positions, "lengths": lengths, "next_position": length + lengths}
    return in_rows((*embedding(tokens), rows), mesh)


def _read_layers(
    layers: Sequence[Any],
    first: Int[Array, ""],
    x: Float[Array, "B N E"],
    given: Float[Array, "B N L P"] | None,
    entries: Entries,
    recurrent: States,
    rows: dict[str, Any],
    *,
    facts: tuple[AttentionLayer, ...],
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries, States, tuple[Entries, ...]]:
    """Runs `through_some`."""
    x, after, states, lent = through_some(layers, first, x, given, entries, recurrent, rows, facts=facts, call=call)
    return in_rows(x, call.mesh), after, in_rows(states, call.mesh), lent


read_some = jax.jit(_read_layers, static_argnames=("facts", "call"), donate_argnames="x")
read_in_place = jax.jit(_read_layers, static_argnames=("facts", "call"), donate_argnames=("x", "entries"))


@partial(jax.jit, static_argnames="mesh")
def logits_of(head: Head, hidden: Float[Array, "B N E"], *, mesh: Mesh | None) -> Float[Array, "B V"]:
    """Returns the float32 logits after the last of N tokens."""
    return by_row(head(hidden[:, -1]), mesh)


def step(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B"], incoming: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by one token in the rows where one is incoming; the others stay as they are.

    Returns:
        Float32 logits after each row's token, and the new cache.
    """
    rows = {"positions": shared(cache.length), "incoming": shared(incoming), "rope": cache.rope}
    stepping = Stepping(cache.policy, cache.policy.limits(len(cache.entries)))
    call, facts = Call(stepping, cache.mesh), facts_of(params.config)
    x, given = params.embedding(tokens[:, None])
    held = cache.entries, cache.recurrent
    x, entries, recurrent, _ = through_some(params.layers, 0, x, given, *held, rows, facts=facts, call=call)
    lenders = {source: entries.of_layers(source, 1) for source in params.config.sources}
    borrowing = replace(call, attention=Borrowing(cache.policy))
    x = through_readers(params, x, given, lenders, rows, facts=facts, call=borrowing)
    entries = entries.exchange(cache.policy.score.across)
    cache = replace(cache, entries=entries, recurrent=recurrent, length=cache.length + incoming)
    return by_row(params.logits(x[:, 0]), cache.mesh), cache.in_place()


jitted_step = jax.jit(step)
