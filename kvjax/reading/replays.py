"""Passes over a prompt that all layers have read, which its score observes before the budget is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import Replaying, positions_behind
from kvjax.cache import Layers, Slots
from kvjax.checks import shown
from kvjax.kv_cache import KVCache
from kvjax.mesh.experts import over_experts
from kvjax.models import Attend, AttentionLayer, Decoder, Embedding, RecurrentState
from kvjax.policy import Pass, Policy, Replay, Score, Texts
from kvjax.runtime.clock import Run, run_at_once

from .call import Call, in_rows
from .layers import begin, facts_of, through_layer

Encode: TypeAlias = Callable[[str], Sequence[int]]


def encoded_texts(policy: Policy, encode: Encode | None) -> Texts:
    """Returns the token ids of the texts that the policy's score replays.

    Raises ValueError for a text where there is no tokenizer to encode it.
    """
    return tuple(_ids(text, encode) for text in policy.score.needs.texts)


def _ids(text: str | tuple[int, ...], encode: Encode | None) -> tuple[int, ...]:
    if not isinstance(text, str):
        return tuple(text)
    if encode is None and text:
        raise ValueError(
            f"the policy replays the text {shown(text)} and there is no tokenizer: expected tokenizer= or token ids"
        )
    return tuple(encode(text)) if encode is not None and text else ()


@partial(jax.jit, static_argnames=("score", "texts", "mesh"))
def passes(
    tokens: Int[Array, "B N"], lengths: Int[Array, "B"], *, score: Score, texts: Texts, mesh: Mesh | None
) -> list[Pass]:
    """Returns the passes over a prompt that a score requests."""
    return in_rows(list(score.passes(tokens, lengths, texts)), mesh)


def replay(params: Decoder, cache: KVCache, part: Pass, *, run: Run = run_at_once) -> KVCache:
    """Returns the cache of a prompt after its score has observed a pass, whose arrays are on the devices of the cache.

    Args:
        run: how programs are run.
    """
    if part.run is not None:
        return run(_run_by_itself, params, cache, part)
    states = _through(params, cache, part, Replaying(cache.policy), run)
    found = (
        replace(held, per_slot=state.per_slot, per_row=state.per_row)
        for held, state in zip(cache.entries, states, strict=True)
    )
    return replace(cache, entries=Layers(tuple(found)))


def left(params: Decoder, cache: KVCache, part: Pass, *, run: Run = run_at_once) -> list[Slots]:
    """Returns the entries that the tokens of a pass leave in each layer, without any state. No score observes it."""
    return list(_through(params, cache, part, Replaying(cache.policy, leaves=True), run))


def _through(params: Decoder, cache: KVCache, part: Pass, attention: Replaying, run: Run) -> Iterator[Slots]:
    """Runs a pass through the layers. It returns what the attention leaves of each."""
    layers = list(zip(params.layers, facts_of(params.config), strict=True))
    embedding = Embedding(params.gates[part.gates]) if part.gates else params.embedding
    x, given, rows = run(begin, embedding, cache.length, part.tokens, part.lengths, mesh=cache.mesh)
    rows, call = _rows(cache, part, rows["positions"]), Call(attention, cache.mesh)
    for i, (layer, facts) in enumerate(layers):
        own, last = (cache.entries.layer(i, 0), cache.recurrent[i]), i == len(layers) - 1
        fixed = {"facts": facts, "call": call, "gates": part.gates, "last": last}
        x, found = run(_replay_layer, layer, np.int32(i), x, given, *own, rows, **fixed)
        yield found


def replayed(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts
) -> KVCache:
    """Returns the cache of a prompt, whose right-aligned tokens these are, after every pass that its score requests.

    Args:
        texts: as `encoded_texts` returns them.
    """
    for part in passes(tokens, lengths, score=cache.policy.score, texts=texts, mesh=cache.mesh):
        cache = replay(params, cache, part)
    return cache


@partial(jax.jit, static_argnames=("facts", "call", "gates", "last"))
def _replay_layer(
    layer: Any,
    index: Int[Array, ""],
    x: Float[Array, "B W E"],
    given: Float[Array, "B W L P"] | None,
    entries: Slots,
    states: tuple[RecurrentState, ...],
    rows: dict[str, Any],
    *,
    facts: AttentionLayer,
    call: Call,
    gates: str,
    last: bool,
) -> tuple[Float[Array, "B W E"] | None, Slots]:
    """Returns a pass's hidden states after a layer, unless it is the last, and what it leaves there, in slots.

    That is the state of the score, or the entries of the pass.

    Args:
        gates: of the pass.
    """
    layer = layer.attention.gates[gates].adapt(layer) if gates else layer
    attention = cast(Replaying, call.attention)
    x, after, _ = through_layer(layer, index, x, given, Layers((entries,)), states, rows, facts=facts, call=call)
    held = after.layer(0, 0)
    state = Slots.only(per_slot=held.per_slot, per_row=held.per_row)
    return None if last else in_rows(x, call.mesh), held.without_state() if attention.leaves else state


@jax.jit
def _run_by_itself(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    """Runs `replay` for a pass that does more than to run forwards."""
    assert part.run is not None
    return replace(cache, entries=part.run(to_run(params, cache, part))).in_place()


def to_run(params: Decoder, cache: KVCache, part: Pass) -> Replay:
    """Returns the arguments of a pass that runs itself."""
    positions = positions_behind(cache.length, part.lengths, part.tokens.shape[1])
    rows = _rows(cache, part, positions)

    def attend(*, instead: Callable[..., Array] | None = None, measured: Array | None = None) -> Attend:
        return Call(Replaying(cache.policy, instead), cache.mesh).attend(**rows, measured=measured)

    records = (replace(record, alone=True) for record in params.attention_layers)
    hidden, given = params.embedding(part.tokens)
    return Replay(
        layers=list(zip(params.layers, records, strict=True)),
        hidden=hidden,
        given=given,
        positions=positions,
        lengths=part.lengths,
        entries=cache.entries,
        recurrent=cache.recurrent,
        attend=attend,
        mix=over_experts(cache.mesh),
    )


def _rows(cache: KVCache, part: Pass, positions: Int[Array, "B W"]) -> dict[str, Any]:
    """Returns the arguments of `Replaying`."""
    rows = {"positions": positions, "lengths": part.lengths, "first": part.first, "last": part.last}
    return rows | {"rope": cache.rope}


def check_one_call(policy: Policy, begins: bool) -> None:
    """Raises ValueError if the score replays a prompt and this call, which does not begin it, is not all of it."""
    if policy.score.needs.whole_prompt and not begins:
        raise ValueError("the policy replays the prompt: expected a prompt that is read in one call")
