"""Passes over a prompt that all layers have read, which its score observes before the budget is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attend import Replaying, positions_behind
from kvjax.cache import Layers, Slots
from kvjax.checks import shown
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, Decoder
from kvjax.policy import Pass, Policy, Score, Texts
from kvjax.runtime.clock import Run, run_at_once

from .each_layer import Call, facts_of, through_layer
from .sensitivity import replayed_backwards
from .units import begin, in_rows

Encode: TypeAlias = Callable[[str], Sequence[int]]
_NOTHING: Any = None


def encoded_texts(policy: Policy, encode: Encode | None) -> Texts:
    """The token ids of the texts that the policy's score replays.

    Raises ValueError for a text where there is no tokenizer to encode it.
    """
    return tuple(_ids(text, encode, type(policy.score).__name__) for text in policy.score.needs.texts)


def _ids(text: str | tuple[int, ...], encode: Encode | None, score: str) -> tuple[int, ...]:
    if not isinstance(text, str):
        return tuple(text)
    if encode is None and text:
        raise ValueError(
            f"{score} replays the text {shown(text)} and there is no tokenizer: expected tokenizer= or token ids"
        )
    return tuple(encode(text)) if encode is not None and text else ()


@partial(jax.jit, static_argnames=("score", "texts", "mesh"))
def passes(
    tokens: Int[Array, "B N"], lengths: Int[Array, "B"], *, score: Score, texts: Texts, mesh: Mesh | None
) -> list[Pass]:
    """The passes over a prompt that a score asks for."""
    return in_rows(list(score.passes(tokens, lengths, texts)), mesh)


def replay(params: Decoder, cache: KVCache, part: Pass, *, run: Run = run_at_once) -> KVCache:
    """The cache of a prompt after its score has observed a pass, whose arrays are on the devices of the cache.

    Args:
        run: how programs are run.
    """
    if cache.policy.score.needs.sensitivity:
        return run(_replayed_backwards, params, cache, part)
    records, scale = params.attention_layers, params.config.embedding_scale
    x, rows = run(begin, params.embed, cache.length, part.tokens, part.lengths, scale=scale, mesh=cache.mesh)
    rows = {name: rows[name] for name in ("positions", "lengths")}
    rows |= {"first": part.first, "last": part.last, "rope": cache.rope}
    found, call = [], Call(Replaying(cache.policy), cache.mesh)
    for i, (layer, record) in enumerate(zip(params.layers, records, strict=True)):
        held, last = cache.entries.layer(i, 0), i == len(records) - 1
        x, state = run(_replay_layer, layer, np.int32(i), x, held, rows, facts=facts_of(record), call=call, last=last)
        found.append(replace(held, per_slot=state.per_slot, per_row=state.per_row))
    return replace(cache, entries=Layers(tuple(found)))


def replayed(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts | None
) -> KVCache:
    """The cache of a prompt, whose right-aligned tokens these are, after every pass that its score asks for.

    Args:
        texts: as `encoded_texts` gives them; None if the score's texts are token ids already.
    """
    texts = encoded_texts(cache.policy, None) if texts is None else texts
    for part in passes(tokens, lengths, score=cache.policy.score, texts=texts, mesh=cache.mesh):
        cache = replay(params, cache, part)
    return cache


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
) -> tuple[Float[Array, "B W E"] | None, Slots]:
    """The hidden states of a pass behind a layer, unless it is the last, and the state of its score, in slots."""
    x, after = through_layer(layer, index, x, Layers((entries,)), rows, facts=facts, call=call)
    held, nothing = after.layer(0, 0), _NOTHING
    state = Slots(nothing, nothing, nothing, nothing, per_slot=held.per_slot, per_row=held.per_row)
    return None if last else in_rows(x, call.mesh), state


@jax.jit
def _replayed_backwards(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    positions = positions_behind(cache.length, part.lengths, part.tokens.shape[1])
    rows = {"positions": positions, "lengths": part.lengths, "first": part.first, "last": part.last, "rope": cache.rope}
    attend = partial(Call(Replaying(cache.policy), cache.mesh).attend, **rows)
    entries = replayed_backwards(params, cache, part.tokens, positions, attend)
    return replace(cache, entries=entries).in_place()


def check_one_call(policy: Policy, begins: bool) -> None:
    """Raises ValueError if the score replays a prompt and this call, which does not begin it, is not all of it."""
    if policy.score.needs.whole_prompt and not begins:
        raise ValueError(
            f"{type(policy.score).__name__} replays the prompt: expected a prompt that is read in one call"
        )
