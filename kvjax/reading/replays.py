"""Passes over a prompt that all layers have read, which its score observes before the budget is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
from jaxtyping import Array, Int

from kvjax.attend import Replaying, positions_behind
from kvjax.checks import shown
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Pass, Policy, Texts
from kvjax.reading.each_layer import Call, through_layers
from kvjax.reading.layerwise import layers_pay, replay_by_layers
from kvjax.reading.sensitivity import replayed_backwards
from kvjax.runtime.clock import Run, run_at_once
from kvjax.runtime.programs import jit

Encode: TypeAlias = Callable[[str], Sequence[int]]


def encoded_texts(policy: Policy, encode: Encode | None) -> Texts:
    """The token ids of the texts that the policy's score replays.

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
    by_layers = not score.needs.sensitivity and layers_pay(params, cache)
    for part in passes(score, tokens, lengths, texts):
        part = jax.tree.map(cache.put_rows, part)
        cache = replay_by_layers(params, cache, part, run=run) if by_layers else run(replay, params, cache, part)
    return cache


passes = jit(
    lambda score, tokens, lengths, texts: score.passes(tokens, lengths, texts), static_argnames=("score", "texts")
)


@jit
def replay(params: Decoder, cache: KVCache, part: Pass) -> KVCache:
    """The same cache after its score has observed a pass."""
    positions = positions_behind(cache.length, part.lengths, part.tokens.shape[1])
    rows = {"positions": positions, "lengths": part.lengths, "first": part.first, "last": part.last, "rope": cache.rope}
    call = Call(Replaying(cache.policy), cache.mesh)
    if cache.policy.score.needs.sensitivity:
        entries = replayed_backwards(params, cache, part.tokens, positions, partial(call.attend, **rows))
    else:
        _, entries = through_layers(params, part.tokens, cache.entries, call, **rows)
    return replace(cache, entries=entries).in_place()


def check_one_call(policy: Policy, begins: bool) -> None:
    """Raises ValueError if the score replays a prompt and this call, which does not begin it, is not all of it."""
    if policy.score.needs.whole_prompt and not begins:
        raise ValueError("the policy replays the prompt: expected a prompt that is read in one call")
