"""What every head holds of one text after its prompt and after each token of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int
from tokenizers.decoders import DecodeStream

from kvjax.cache import KVCache
from kvjax.decode import Decoding, take
from kvjax.extend import read_prompt, replayed, run_at_once
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.prompts import Prompt
from kvjax.sampling import SamplingMethod
from kvjax.session import EndTokens, Session, room_for
from kvjax.sharding import fetch

from .merging import NOWHERE, into_at_prompt, into_at_step, merges

Heads: TypeAlias = list[list[Int[np.ndarray, "_"]]]  # an array for each kv head of each layer


@dataclass(frozen=True)
class Recording:
    """One text under a policy. Step 0 is the end of the prompt; in step s the s-th token of the answer comes in.

    The last token of an answer has no entry yet, so that an answer of n tokens takes n - 1 steps.

    Attributes:
        tokens: ids of prompt and answer.
        texts: of each token, as it continues the text before it; empty where a character is not complete yet.
        prompt: how many of the tokens are the prompt's.
        policy: as a user wrote it.
        left: the step in which an entry was evicted, 0 if it went when the prompt was compressed; steps + 1 if it is
            still held at the end. An entry that has left never comes back.
        into: of an entry that has left, the position of the one that it was merged into, NOWHERE if it was dropped and
            SEVERAL if it was shared out; None under a policy that merges nothing.
    """

    tokens: Int[np.ndarray, "N"]
    texts: tuple[str, ...]
    prompt: int
    policy: str
    left: Int[np.ndarray, "L H E"]
    into: Int[np.ndarray, "L H E"] | None = None

    @property
    def steps(self) -> int:
        """Tokens of the answer that came in."""
        return len(self.tokens) - 1 - self.prompt

    @property
    def came(self) -> Int[np.ndarray, "E"]:
        """The step in which each position came in."""
        return np.maximum(np.arange(self.left.shape[-1]) - self.prompt + 1, 0)

    def held(self, step: int) -> Bool[np.ndarray, "L H E"]:
        """Which positions each head of each layer holds after a step."""
        return (self.came <= step) & (self.left > step)


def record(
    params: Decoder,
    prompt: Prompt,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 32,
    sampler: SamplingMethod | None = None,
    seed: int = 0,
    eos: EndTokens = None,
    tokenizer: Any = None,
    chunk: int | None = None,
    name: str | None = None,
) -> Recording:
    """Answers one prompt, and keeps which positions the cache holds after each step.

    The tokens are those of `generate`, whose arguments these are. Positions are fetched at every token, which takes
    its time.

    Args:
        name: of the policy, as the recording shows it; by default the policy in full.

    Raises:
        ValueError: for a prompt of several rows, and as `generate` does.
    """
    session = Session.open(
        params,
        prompt,
        policy=policy,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        seed=seed,
        eos=eos,
        tokenizer=tokenizer,
        chunk=chunk,
    )
    if len(session.batch.lengths) != 1:
        raise ValueError(f"a prompt of {len(session.batch.lengths)} rows; accepted is one, whose cache is looked at")
    length = int(session.batch.lengths[0])
    read = partial(
        read_prompt,
        params,
        session.cache,
        session.batch.tokens,
        session.batch.lengths,
        chunk=chunk,
        texts=session.texts,
    )
    follows, whereabouts = merges(session.cache.policy), []
    if follows:
        _, whole = read(room=0, compress="never")
        tokens, lengths = whole.put_rows(session.batch.tokens), whole.put_rows(session.batch.lengths)
        whole = replayed(params, whole, tokens, lengths, session.texts, run_at_once)
        whereabouts.append(_whereabouts(whole, into_at_prompt(params, whole)))
    logits, cache = read(room=room_for(max_new_tokens), compress="auto")
    held = [positions_held(cache, 0)]
    state = take(Decoding.begin(session, cache, size=0, log_probs=False), logits, sampler=session.sampler)
    answer = [_pending(state)]
    while len(answer) < max_new_tokens and fetch(state.active)[0]:
        if follows and state.cache.policy.merge.absorbs:
            whereabouts.append(_whereabouts(state.cache, into_at_step(params, state.cache)))
        state = _advance(state, params, sampler=session.sampler)
        held.append(positions_held(state.cache, 0))
        answer.append(_pending(state))
    tokens = np.concatenate([session.batch.tokens[0, -length:], answer]).astype(np.int32)
    left = _left(held, len(tokens) - 1, length)
    return Recording(
        tokens=tokens,
        texts=texts_of(tokens.tolist(), tokenizer),
        prompt=length,
        policy=str(state.cache.policy) if name is None else name,
        left=left,
        into=_into(whereabouts, left, len(answer)) if follows else None,
    )


_advance = jax.jit(Decoding.advance, static_argnames="sampler", donate_argnums=0)


def _pending(state: Decoding) -> int:
    return int(fetch(state.cache.pending)[0])


def positions_held(cache: KVCache, row: int) -> Heads:
    """The positions that a row of a cache holds, in any order, by layer and kv head."""
    held = _by_head(cache, row, _positions(cache))
    return [[head[head >= 0] for head in layer] for layer in held]


def _positions(cache: KVCache) -> Any:
    return cache.pool.positions if cache.pool is not None else tuple(layer.positions for layer in cache.layers)


def _by_head(cache: KVCache, row: int, arrays: Any) -> Heads:
    """What a row has of arrays that lie as a cache's positions do: [B, H, S] for each layer, or [B, P, T] of a pool."""
    if cache.pool is None:
        return [list(fetch(layer)[row]) for layer in arrays]
    pool = cache.pool
    rows, start, size = (fetch(x)[row] for x in (arrays, pool.start, pool.size))
    heads, layers = start.shape

    def segment(layer: int, head: int) -> Int[np.ndarray, "_"]:
        lane, first = head // (heads // pool.lanes), start[head, layer]
        return rows[lane, first : first + size[head, layer]]

    return [[segment(layer, head) for head in range(heads)] for layer in range(layers)]


def _whereabouts(cache: KVCache, into: Any) -> tuple[Heads, Heads]:
    """The positions of the entries of a cache, and where they are about to go, by layer and kv head."""
    return _by_head(cache, 0, _positions(cache)), _by_head(cache, 0, into)


def _into(whereabouts: list[tuple[Heads, Heads]], left: Int[np.ndarray, "L H E"], steps: int) -> np.ndarray:
    """Where each entry went when it left: what was last said of it, unless that was that it stays."""
    into = np.full_like(left, NOWHERE)
    for positions, targets in whereabouts:
        for layer, head in np.ndindex(left.shape[:2]):
            held = positions[layer][head] >= 0
            into[layer, head, positions[layer][head][held]] = targets[layer][head][held]
    return np.where((left < steps) & (into != np.arange(left.shape[-1])), into, NOWHERE)


def _left(seen: list[Heads], count: int, prompt: int) -> Int[np.ndarray, "L H E"]:
    """The step in which each of `count` positions went, from what was held after each step."""
    left = np.zeros((len(seen[0]), len(seen[0][0]), count), np.int32)
    for now, layers in enumerate(seen):
        for entries, heads in zip(left, layers, strict=True):
            for until, positions in zip(entries, heads, strict=True):
                new = np.maximum(positions - prompt + 1, 0) == now
                assert np.array_equal(until[positions], np.where(new, 0, now)), "an entry came back"
                until[positions] = now + 1
    return left


def texts_of(tokens: list[int], tokenizer: Any) -> tuple[str, ...]:
    """What each token adds to a text; the ids themselves, parted by spaces, without a tokenizer."""
    if tokenizer is None:
        return tuple(f"{token} " for token in tokens)
    stream = DecodeStream(skip_special_tokens=False)
    return tuple(stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens)
