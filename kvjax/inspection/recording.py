"""`record`: which positions every head retains after the prompt and after each token of the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int

from kvjax.checks import index_of
from kvjax.decoding.loop import NOT_FINITE, Decoding, not_finite, take
from kvjax.decoding.sampling import SamplingMethod
from kvjax.decoding.text_stream import TextStream
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.reading.replays import replayed
from kvjax.request.ends import EndTokens
from kvjax.request.prompts import Prompt
from kvjax.request.request import AnswerOptions, Request, Seed, read_request
from kvjax.runtime.modes import own_modes
from kvjax.runtime.progress import tell

from .merging import NOWHERE, into_at_prompt, into_at_step

ABSENT = -1
"""Stands for the steps of a head that a layer does not have."""
Heads: TypeAlias = list[list[Int[np.ndarray, "_"]]]  # one array per layer and kv head


@dataclass(frozen=True)
class Recording:
    """The entries of one sequence that each head retains under a policy, step by step.

    Step 0 is the end of the prompt. In step s the s-th token of the answer enters the cache. The last token of an
    answer has no entry yet, so an answer of n tokens has n - 1 steps. L counts layers, H the kv heads of the layer with
    most, and E the positions that enter the cache.

    Attributes:
        tokens: int32 ids of prompt and answer.
        texts: the text of each token as it continues the text before it; empty where a character is incomplete.
        prompt: the number of prompt tokens.
        policy: the policy as the caller named it.
        left: int32, the step in which an entry was evicted: 0 if the compression of the prompt evicted it, steps + 1 if
            it is retained at the end. An evicted entry never comes back. ABSENT (-1) for a head that a layer lacks.
        into: int32. For an evicted entry it is the position of the entry that it was merged into, NOWHERE if it was
            dropped, and SEVERAL if it was merged into several entries. None under a policy that does not merge.
        model: the model as the caller named it; empty if it has no name.
    """

    tokens: Int[np.ndarray, "N"]
    texts: tuple[str, ...]
    prompt: int
    policy: str
    left: Int[np.ndarray, "L H E"]
    into: Int[np.ndarray, "L H E"] | None = None
    model: str = ""

    @property
    def steps(self) -> int:
        """The number of answer tokens that entered the cache."""
        return len(self.tokens) - 1 - self.prompt

    @property
    def came(self) -> Int[np.ndarray, "E"]:
        """The step in which each position entered the cache."""
        return np.maximum(np.arange(self.left.shape[-1]) - self.prompt + 1, 0)

    def held(self, step: int) -> Bool[np.ndarray, "L H E"]:
        """Marks the positions that each head of each layer retains after a step, 0 to `steps`; negative: from the end.

        Raises:
            ValueError: for a step that the recording does not have.
        """
        step = index_of("step", step, self.steps + 1)
        return (self.came <= step) & (self.left > step)


@own_modes()
def record(
    params: Decoder,
    prompt: Prompt,
    *,
    policy: Policy | str | None = None,
    max_new_tokens: int = 32,
    sampler: SamplingMethod | None = None,
    seed: Seed = 0,
    eos: EndTokens = None,
    tokenizer: Any = None,
    chunk: int | None = None,
    name: str | None = None,
    model: str = "",
) -> Recording:
    """Answers one prompt and records which positions the cache retains after each step.

    The tokens are those of `generate`, which documents the arguments. Recording is slow, because it fetches all
    positions from the device at every token.

    Args:
        params: the decoder, an nnx module `Decoder` that `load` returns.
        name: the policy's name in the recording. The default is the text of the full policy.
        model: the model's name in the recording.

    Raises:
        ValueError: for a prompt of several rows, and as `generate` does.
    """
    answering = AnswerOptions(max_new_tokens, sampler, seed, eos)
    request = Request.of(params, prompt, policy=policy, tokenizer=tokenizer, chunk=chunk, answer=answering)
    if len(request.batch.lengths) != 1:
        raise ValueError(f"the prompt has {len(request.batch.lengths)} rows: expected one row")
    length = int(request.batch.lengths[0])
    follows, whereabouts = request.cache.policy.merge.effects.merges, []
    if follows:
        _, uncompressed = read_request(params, replace(request, limit=0, compress="never"))
        tokens, lengths = map(uncompressed.put_rows, request.batch.arrays)
        uncompressed = replayed(params, uncompressed, tokens, lengths, request.texts)
        whereabouts.append(_whereabouts(uncompressed, into_at_prompt(params, uncompressed)))
    logits, cache = read_request(params, request)
    learned = range(length, int(fetch(cache.length)[0]))
    held = [_of_text(positions_held(cache, 0), learned)]
    state = take(Decoding.begin(request.sampling, cache, size=0, log_probs=False), logits)
    answer = [_pending(state)]
    while len(answer) < request.limit and fetch(state.active)[0]:
        tell("recording", len(answer), request.limit, "tokens")
        if follows and state.cache.policy.merge.effects.at_steps:
            whereabouts.append(_whereabouts(state.cache, into_at_step(params, state.cache)))
        state = _advance(state, params)
        held.append(_of_text(positions_held(state.cache, 0), learned))
        answer.append(_pending(state))
    tokens = np.concatenate([request.batch.tokens[0, -length:], answer]).astype(np.int32)
    left = _left(held, len(tokens) - 1, length)
    return Recording(
        tokens=tokens,
        texts=texts_of(tokens.tolist(), tokenizer),
        prompt=length,
        policy=str(state.cache.policy) if name is None else name,
        left=left,
        into=_into(whereabouts, left, len(answer)) if follows else None,
        model=model,
    )


_advance = jax.jit(Decoding.advance, donate_argnums=0)


def _pending(state: Decoding) -> int:
    token = int(fetch(state.cache.pending)[0])
    if token == NOT_FINITE:
        raise not_finite(0, int(fetch(state.cache.length)[0]))
    return token


def _of_text(held: Heads, learned: range) -> Heads:
    """Returns positions that a row holds as those of its text, which learned tokens behind the prompt are not part of.

    Args:
        learned: the positions of these.
    """

    def moved(head: Int[np.ndarray, "_"]) -> Int[np.ndarray, "_"]:
        return np.where(head < learned.start, head, head - len(learned))[~np.isin(head, learned)]

    return [[moved(head) for head in layer] for layer in held] if learned else held


def positions_held(cache: KVCache, row: int) -> Heads:
    """Returns the positions that a row of a cache retains, in any order, by layer and kv head."""
    return [[head[head >= 0] for head in layer] for layer in cache.entries.by_head(row)]


def _whereabouts(cache: KVCache, into: Any) -> tuple[Heads, Heads]:
    """Returns the positions of a cache's entries and those that they are about to merge into, by layer and kv head."""
    return cache.entries.by_head(0), cache.entries.by_head(0, into)


def _into(whereabouts: list[tuple[Heads, Heads]], left: Int[np.ndarray, "L H E"], steps: int) -> np.ndarray:
    """Returns where each evicted entry went: its last recorded target, or NOWHERE if that target was itself."""
    into = np.full_like(left, NOWHERE)
    for positions, targets in whereabouts:
        for layer, heads in enumerate(positions):
            for head, own in enumerate(heads):
                into[layer, head, own[own >= 0]] = targets[layer][head][own >= 0]
    return np.where((left < steps) & (into != np.arange(left.shape[-1])), into, NOWHERE)


def _left(seen: list[Heads], count: int, prompt: int) -> Int[np.ndarray, "L H E"]:
    """Returns the step in which each of `count` positions was evicted, from the positions retained after each step."""
    numbers = [len(heads) for heads in seen[0]]
    left = np.full((len(numbers), max(numbers), count), ABSENT, np.int32)
    for entries, number in zip(left, numbers, strict=True):
        entries[:number] = 0
    for now, layers in enumerate(seen):
        for entries, heads in zip(left, layers, strict=True):
            for until, positions in zip(entries, heads, strict=False):  # a layer may have fewer heads than another
                new = np.maximum(positions - prompt + 1, 0) == now
                assert np.array_equal(until[positions], np.where(new, 0, now)), "an entry came back"
                until[positions] = now + 1
    return left


def texts_of(tokens: list[int], tokenizer: Any) -> tuple[str, ...]:
    """Returns the text that each token adds, together all. Without a tokenizer it is the token's id and a space."""
    if tokenizer is None:
        return tuple(f"{token} " for token in tokens)
    stream = TextStream(tokenizer, skip_special_tokens=False)
    texts = [stream.add(token) for token in tokens]
    return (*texts[:-1], texts[-1] + stream.end())
