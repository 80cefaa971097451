"""Passes over a prompt that all layers have read, which its score observes before the budget is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Int

from kvjax.attend import Replaying, positions_behind
from kvjax.checks import shown
from kvjax.kv_cache import KVCache
from kvjax.mesh.experts import over_experts
from kvjax.models import Attend, Decoder, embedded
from kvjax.policy import Pass, Policy, Replay, Texts
from kvjax.reading.each_layer import Call, through_layers
from kvjax.reading.layerwise import layers_pay, replay_by_layers
from kvjax.runtime.clock import Run, run_at_once
from kvjax.runtime.programs import jit

Encode: TypeAlias = Callable[[str], Sequence[int]]


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


def replayed(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    texts: Texts | None,
    run: Run = run_at_once,
) -> KVCache:
    """The cache of a prompt, whose tokens these are, after every pass that its score asks for.

    Args:
        tokens: right-aligned.
        texts: as `encoded_texts` gives them; None if the score's texts are token ids already.
        run: how programs are run.
    """
    score = cache.policy.score
    texts = encoded_texts(cache.policy, None) if texts is None else texts
    for part in passes(score, tokens, lengths, texts):
        part = jax.tree.map(cache.put_rows, part)
        by_layers = part.run is None and layers_pay(params, cache)
        cache = replay_by_layers(params, cache, part, run=run) if by_layers else run(replay, params, cache, part)
    return cache


passes = jit(
    lambda score, tokens, lengths, texts: score.passes(tokens, lengths, texts), static_argnames=("score", "texts")
)


@jit
def replay(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    """The same cache after its score has observed a pass."""
    if part.run is not None:
        entries = part.run(to_run(params, cache, part))
    else:
        call = Call(Replaying(cache.policy), cache.mesh)
        _, entries = through_layers(params, part.tokens, cache.entries, call, **_rows(cache, part))
    return replace(cache, entries=entries).in_place()


def to_run(params: Decoder, cache: KVCache, part: Pass) -> Replay:
    """What a pass that runs itself works with."""
    rows = _rows(cache, part)

    def attend(*, instead: Callable[..., Array] | None = None, measured: Array | None = None) -> Attend:
        return Call(Replaying(cache.policy, instead), cache.mesh).attend(**rows, measured=measured)

    records = (replace(record, alone=True) for record in params.attention_layers)
    return Replay(
        layers=list(zip(params.layers, records, strict=True)),
        hidden=embedded(params.embed, part.tokens, params.config.embedding_scale),
        positions=rows["positions"],
        entries=cache.entries,
        attend=attend,
        mix=over_experts(cache.mesh),
    )


def _rows(cache: KVCache, part: Pass) -> dict[str, Any]:
    """The arguments of `Replaying`."""
    positions = positions_behind(cache.length, part.lengths, part.tokens.shape[1])
    return {
        "positions": positions,
        "lengths": part.lengths,
        "first": part.first,
        "last": part.last,
        "rope": cache.rope,
    }


def check_one_call(policy: Policy, begins: bool) -> None:
    """Raises ValueError if the score replays a prompt and this call, which does not begin it, is not all of it."""
    if policy.score.needs.whole_prompt and not begins:
        raise ValueError(
            f"{type(policy.score).__name__} replays the prompt: expected a prompt that is read in one call"
        )
