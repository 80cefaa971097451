"""Generating: a prompt is read once, then one jitted loop decodes until every row has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.cache import KVCache
from kvjax.clock import Clock
from kvjax.decode import Decoding, decode
from kvjax.extend import Compress, read_prompt
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.prompts import Prompt
from kvjax.sampling import SamplingMethod
from kvjax.session import EndTokens, Session, room_for
from kvjax.sharding import fetch


@dataclass(frozen=True)
class Stats:
    """What a call took, in wall-clock seconds; compilation is counted apart from the rest.

    Attributes:
        decoded_tokens: of all rows, those of the prompt's own logits excepted.
        cache_bytes: held at the end: keys, values, positions and the policy's state.
        full_cache_bytes: keys and values of every token seen, once a kv head: an uncompressed GQA cache.
    """

    prompt_tokens: int
    decoded_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    full_cache_bytes: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all rows together; 0 if nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times smaller the cache is than an uncompressed one."""
        return self.full_cache_bytes / self.cache_bytes


@dataclass(frozen=True)
class Generation:
    """Answers, and what they leave behind.

    Attributes:
        tokens: int32 ids, -1 after the end of a row. An end token is part of its row.
        lengths: of each row.
        text: the rows decoded without special tokens, if there was a tokenizer.
        log_probs: of each token under the unmodified model, 0 after the end of a row, if asked for.
        cache: to go on with. The last token of each row has no entry in it yet: it is `cache.pending`.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    text: list[str] | None
    log_probs: Float[np.ndarray, "B T"] | None
    cache: KVCache
    stats: Stats


def generate(
    params: Decoder,
    prompt: Prompt | None,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    sampler: SamplingMethod | None = None,
    seed: int | Sequence[int] = 0,
    eos: EndTokens = None,
    tokenizer: Any = None,
    cache: KVCache | None = None,
    log_probs: bool = False,
    chunk: int | None = None,
    compress: Compress = "auto",
) -> Generation:
    """Answers a batch of prompts under a cache policy.

    Rows of different lengths give the same tokens as each alone. Programs are compiled once a bucket of lengths.

    Args:
        params: the decoder, as `load` returns it.
        prompt: a string, a list of strings, an integer array [N] or [B, N], or ragged lists of ids; None continues
            `cache` from its pending tokens.
        policy: what the cache keeps; `policies.full()` by default, or the cache's own.
        max_new_tokens: at most so many tokens a row.
        sampler: `Greedy()` by default.
        seed: row b's draws depend on (seed, b, position) and nothing else; with one seed a row, on that and position.
        eos: an end token, several, or several for each row; by default the tokenizer's. `()` for none.
        tokenizer: for prompts of text, and to return text. Its special tokens are added where a text begins.
        cache: an earlier `Generation.cache`, or the result of `prefill`. It is extended as a copy and stays as it is.
        log_probs: return the log-probability of each token.
        chunk: read the prompt so many tokens at a time, in less memory. The result is that of one call.
        compress: when to compress: "auto" when the prompt has been read, and after later turns if the policy evicts
            while decoding; "end" and "never" whatever the policy; "chunk" after each chunk too, so that a prompt of any
            length is read in constant memory.

    Raises:
        ValueError: before anything is compiled, for any argument that is not accepted, saying what is.
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
        cache=cache,
        chunk=chunk,
        compress=compress,
    )
    room = room_for(max_new_tokens)
    clock = Clock()
    logits, filled = read_prompt(
        params,
        session.cache,
        session.batch.tokens,
        session.batch.lengths,
        room=room,
        chunk=chunk,
        compress=compress,
        texts=session.texts,
        clock=clock,
    )
    state = Decoding.begin(session, filled, size=room, log_probs=log_probs)
    limit = np.int32(max_new_tokens)
    state, _ = clock.run("decode", decode, params, state, logits, limit, sampler=session.sampler)
    lengths = fetch(state.lengths)
    longest = int(lengths.max())
    tokens = fetch(state.tokens)[:, :longest]
    text = None
    if tokenizer is not None:
        text = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(tokens, lengths, strict=True)]
    return Generation(
        tokens=tokens,
        lengths=lengths,
        text=text,
        log_probs=None if state.log_probs is None else fetch(state.log_probs)[:, :longest],
        cache=state.cache,
        stats=Stats(
            prompt_tokens=int(session.batch.lengths.sum()),
            decoded_tokens=int((lengths - 1).sum()),
            prefill_seconds=clock.seconds["prefill"],
            decode_seconds=clock.seconds["decode"],
            compile_seconds=clock.seconds["compile"],
            cache_bytes=state.cache.nbytes,
            full_cache_bytes=int(fetch(state.cache.length).sum()) * params.config.bytes_per_token(filled.dtype),
        ),
    )


def prefill(
    params: Decoder,
    prompt: Prompt,
    *,
    policy: Policy | None = None,
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    compress: Compress = "auto",
    clock: Clock | None = None,
) -> KVCache:
    """Reads a document into a cache, to ask several questions of it: `generate(params, question, cache=cache)`.

    The arguments are those of `generate`. A cache that was read with `compress="never"` counts as unfinished: what is
    read into it next continues the prompt. A clock counts the programs run as "prefill".
    """
    session = Session.open(
        params, prompt, policy=policy, tokenizer=tokenizer, cache=cache, chunk=chunk, compress=compress
    )
    _, cache = read_prompt(
        params,
        session.cache,
        session.batch.tokens,
        session.batch.lengths,
        room=0,
        chunk=chunk,
        compress=compress,
        texts=session.texts,
        clock=clock,
    )
    return cache
