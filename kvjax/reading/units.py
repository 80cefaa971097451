"""The programs of a reading: the first hidden states, the layers, the logits. Layers of a kind share one program.

The host starts one program after the other. The programs of a deep model are therefore those of a shallow one, and the
activations of a layer are forgotten before the next one runs. Inside a caller's `jax.jit` they are parts of the
caller's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import Reading, ReadPlan, positions_behind
from kvjax.cache import Entries, Slots
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import logical_sharding, rows_sharding
from kvjax.models import AttentionLayer, Decoder, Head, embedded
from kvjax.runtime.clock import Run, run_at_once

from .each_layer import Call, facts_of, through_some

# A program of a GPU reads so many tokens of all rows and layers together, unless it then has more layers than these.
# With one layer for 512 tokens an H100 answers 0.81 of the tokens per second.
TOKENS, MOST_LAYERS = 4096, 8


def read(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan,
    run: Run = run_at_once,
    owned: bool = False,
) -> tuple[Float[Array, "B N E"], KVCache]:
    """Extends a cache by up to N tokens per row, with every static choice made.

    Args:
        tokens: right-aligned, on the devices of the cache.
        run: how programs are run.
        owned: whether nobody else has the cache, which then changes in place. Its layers must keep their shapes.

    Returns:
        The hidden states behind the last layer, of which `logits_of` takes the last column, and the new cache.
    """
    entries = cache.entries
    if entries.preallocates and not owned:  # each layer changes the pool in place
        entries, owned = jax.tree.map(jnp.array, entries), True
    reader = _Reader(params, cache, tokens, lengths, plan=plan, run=run, in_place=owned)
    at_once, layers = layers_at_once(tokens.size, cache.mesh), len(params.layers)
    for first in range(0, layers, at_once):
        part = entries.of_layers(first, min(at_once, layers - first))
        entries = entries.with_layers(first, reader.layers(first, part))
    filled = cache.filled or plan.final
    return reader.hidden, replace(cache, entries=entries, length=reader.rows["next_position"], filled=filled)


def read_layers(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    plan: ReadPlan | None,
    run: Run = run_at_once,
) -> Iterator[Slots]:
    """The entries of each layer of slots after up to N tokens per row have been appended, one layer after another.

    Args:
        tokens: right-aligned, on the devices of the cache.
        plan: as `kvjax.attend.Reading` has it.
        run: how programs are run.
    """
    reader = _Reader(params, cache, tokens, lengths, plan=plan, run=run)
    for i in range(len(params.layers)):
        yield reader.layers(i, cache.entries.of_layers(i, 1)).layer(0, 0)


class _Reader:
    """Tokens on their way through the layers.

    Attributes:
        hidden: the hidden states behind the last layer that was read; its program donates those before it.
        rows: what attention has to know of each row.
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
    ) -> None:
        self._layers, self._run = params.layers, run
        self._facts = facts_of(params.config)
        self._call = Call(Reading(cache.policy, cache.policy.limits(len(self._facts)), plan), cache.mesh)
        self._program = read_in_place if in_place else read_some
        self.hidden, self.rows = run(
            begin, params.embed, cache.length, tokens, lengths, scale=params.config.embedding_scale, mesh=cache.mesh
        )
        self._rope = cache.rope

    def layers(self, first: int, entries: Entries) -> Entries:
        """Reads the layers that come next, to which these entries belong, and returns their entries."""
        rows, some = self.rows | {"rope": self._rope}, slice(first, first + len(entries))
        static = {"facts": tuple(self._facts[some]), "call": self._call.of_layers(first, len(entries))}
        self.hidden, part = self._run(
            self._program, self._layers[some], np.int32(first), self.hidden, entries, rows, **static
        )
        return part


def layers_at_once(tokens: int, mesh: Mesh | None) -> int:
    """How many layers a program reads of so many tokens: one, and on a GPU several, up to TOKENS tokens together.

    A GPU would have read fewer tokens before the host starts the next program.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return min(max(1, TOKENS // tokens), MOST_LAYERS) if platform == "gpu" else 1


@partial(jax.jit, static_argnames=("scale", "mesh"))
def begin(
    embed: Any,
    length: Int[Array, "B"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B N E"], dict[str, Array]]:
    """The first hidden states of tokens that extend rows of a length, and what attention has to know of the rows."""
    positions = positions_behind(length, lengths, tokens.shape[1])
    rows = {"positions": positions, "lengths": lengths, "next_position": length + lengths}
    return in_rows((embedded(embed, tokens, scale), rows), mesh)


def _read_layers(
    layers: Sequence[Any],
    first: Int[Array, ""],
    x: Float[Array, "B N E"],
    entries: Entries,
    rows: dict[str, Any],
    *,
    facts: tuple[AttentionLayer, ...],
    call: Call,
) -> tuple[Float[Array, "B N E"], Entries]:
    """The hidden states behind some layers, and their entries."""
    x, after = through_some(layers, first, x, entries, rows, facts=facts, call=call)
    return in_rows(x, call.mesh), after


read_some = jax.jit(_read_layers, static_argnames=("facts", "call"), donate_argnames="x")
read_in_place = jax.jit(_read_layers, static_argnames=("facts", "call"), donate_argnames=("x", "entries"))


@partial(jax.jit, static_argnames="mesh")
def logits_of(head: Head, hidden: Float[Array, "B N E"], *, mesh: Mesh | None) -> Float[Array, "B V"]:
    """The float32 logits after the last of N tokens."""
    return by_row(head(hidden[:, -1]), mesh)


def by_row(logits: Float[Array, "B V"], mesh: Mesh | None) -> Float[Array, "B V"]:
    """The logits with whole rows on each device that has a part of the batch, as samplers need them."""
    if mesh is None:
        return logits
    # The logits are gathered after the product: if whole rows are requested of it, XLA gathers the unembedding.
    cut = logical_sharding(mesh, ("batch", "vocab"), logits.shape)
    return in_rows(jax.lax.with_sharding_constraint(logits, cut), mesh)


def in_rows(x: Any, mesh: Mesh | None) -> Any:
    """Arrays with axes [B, ...], with whole rows on each device that has a part of the batch."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, rows_sharding(mesh))
