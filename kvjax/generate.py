"""Generating: a prompt is read once, then one jitted loop decodes until every row has ended."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import KVCache
from kvjax.extend import Compress, check_policy, read_prompt, step
from kvjax.models import Decoder
from kvjax.policies import full
from kvjax.policy import Policy
from kvjax.prompts import Batch, Prompt, rows_of
from kvjax.sampling import Greedy, Sampler, log_probability

EndTokens: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]] | None

ROOM_STEP = 64  # answers are given room in steps of so many tokens, so that few programs serve all limits


@dataclass(frozen=True)
class Stats:
    """What a call took. Times are wall-clock seconds without compilation, which is counted apart.

    Attributes:
        cache_bytes: held at the end: keys, values, positions and the policy's state.
        full_cache_bytes: keys and values of every token seen, one a kv head: an uncompressed GQA cache.
    """

    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    prompt_tokens: int
    new_tokens: int
    decode_steps: int
    cache_bytes: int
    full_cache_bytes: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all rows together. The first token of a row comes from the prompt and does not count."""
        decoded = self.new_tokens - self._rows
        return decoded / self.decode_seconds if decoded and self.decode_seconds else 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times smaller the cache is than an uncompressed one."""
        return self.full_cache_bytes / self.cache_bytes

    _rows: int = field(default=1, repr=False)


@dataclass(frozen=True)
class Generation:
    """The answers, and what they leave behind.

    Attributes:
        tokens: int32 ids, -1 after the end of a row. An end token counts as part of its row.
        lengths: of each row.
        text: decoded rows without special tokens, if there was a tokenizer.
        log_probs: log-probability of each token under the unmodified model, 0 after the end, if asked for.
        cache: to go on with. Its `pending` token is the last one sampled.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    text: list[str] | None
    log_probs: Float[np.ndarray, "B T"] | None
    cache: KVCache
    stats: Stats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """A loop under way. `active` rows go on; `seen` marks their tokens where the sampler penalises repetition."""

    cache: KVCache
    active: Bool[Array, "B"]
    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    log_probs: Float[Array, "B T"] | None
    seen: Bool[Array, "B V"] | None
    keys: Array
    ends: Int[Array, "B E"]

    @classmethod
    def begin(cls, session: Session, cache: KVCache, size: int, log_probs: bool) -> Decoding:
        batch = cache.batch_size
        return cls(
            cache,
            active=np.ones(batch, bool),
            tokens=np.full((batch, size), -1, np.int32),
            lengths=np.zeros(batch, np.int32),
            log_probs=np.zeros((batch, size), np.float32) if log_probs else None,
            seen=session.seen,
            keys=session.keys,
            ends=session.ends,
        )

    def take(self, logits: Float[Array, "B V"], sampler: Sampler) -> Decoding:
        """Samples each active row's next token, which is then pending."""
        cache = self.cache
        keys = jax.vmap(jax.random.fold_in)(self.keys, cache.length)
        token = sampler(logits, keys, self.seen).astype(jnp.int32)
        rows = jnp.arange(token.shape[0])
        column = jnp.where(self.active, self.lengths, self.tokens.shape[1])
        log_probs, seen = self.log_probs, self.seen
        if log_probs is not None:
            log_probs = log_probs.at[rows, column].set(log_probability(logits, token), mode="drop")
        if seen is not None:
            seen = seen.at[rows, token].max(self.active)
        return replace(
            self,
            cache=replace(cache, pending=jnp.where(self.active, token, cache.pending)),
            active=self.active & ~jnp.any(token[:, None] == self.ends, axis=1),
            tokens=self.tokens.at[rows, column].set(token, mode="drop"),
            lengths=self.lengths + self.active,
            log_probs=log_probs,
            seen=seen,
        )

    def advance(self, params: Decoder, sampler: Sampler) -> Decoding:
        """Decodes the pending token of each active row and samples the next."""
        logits, cache = step(params, self.cache, self.cache.pending, self.active)
        return replace(self, cache=cache).take(logits, sampler)


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def _decode(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: Int[Array, ""], sampler: Sampler
) -> tuple[Decoding, Int[Array, ""]]:
    """Up to `limit` tokens a row, and how many steps that took."""

    def goes_on(carry: tuple[Decoding, Array]) -> Array:
        state, count = carry
        return (count < limit) & jnp.any(state.active)

    def body(carry: tuple[Decoding, Array]) -> tuple[Decoding, Array]:
        state, count = carry
        return state.advance(params, sampler), count + 1

    state, count = jax.lax.while_loop(goes_on, body, (state.take(logits, sampler), jnp.int32(1)))
    return state, count - 1


@dataclass(frozen=True)
class Session:
    """A checked request: everything that is known before anything is compiled."""

    batch: Batch
    cache: KVCache
    ends: Int[np.ndarray, "B E"]
    keys: Array
    seen: Bool[np.ndarray, "B V"] | None


def generate(
    params: Decoder,
    prompt: Prompt | None,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    sampler: Sampler | None = None,
    seed: int | Sequence[int] = 0,
    eos: EndTokens = None,
    tokenizer: Any = None,
    cache: KVCache | None = None,
    log_probs: bool = False,
    chunk: int | None = None,
    compress: Compress = "auto",
) -> Generation:
    """Answers a batch of prompts under a cache policy.

    Rows of different lengths give the same tokens as alone. Programs are compiled once a bucket of prompt lengths.

    Args:
        params: the decoder, as `load` returns it.
        prompt: a string, a list of strings, an integer array [N] or [B, N], or ragged lists of ids; None continues
            `cache` from its pending tokens.
        policy: what the cache keeps; `policies.full()` by default, and the cache's own where one is given.
        max_new_tokens: at most so many tokens a row.
        sampler: `Greedy()` by default.
        seed: of the sampler. Row b draws from (seed, b, position), so a row repeats in any company at its place; give
            one seed a row for draws that do not depend on the place either.
        eos: an end token, several, or several for each row; by default the tokenizer's. `()` for none.
        tokenizer: for prompts of text, and to return text. Its special tokens are added where a text begins.
        cache: an earlier `Generation.cache` or the result of `prefill`, which is extended as a copy: it stays as it is.
        log_probs: return the log-probability of each token.
        chunk: read the prompt so many tokens at a time, for less memory. The result is that of one call.
        compress: when to compress: "auto" at the end of a prompt, and of later turns if the policy evicts while
            decoding; "end" and "never" whatever the policy; "chunk" also after each chunk, so that a prompt of any
            length is read in constant memory.

    Raises:
        ValueError: before anything is compiled, for every argument that is not accepted; it says what is.
    """
    session = open_session(
        params, prompt, policy=policy, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed, eos=eos,
        tokenizer=tokenizer, cache=cache, chunk=chunk,
    )  # fmt: skip
    sampler = sampler or Greedy()
    room = -(-max_new_tokens // ROOM_STEP) * ROOM_STEP
    clock = Clock()
    logits, filled = read_prompt(
        params, session.cache, session.batch.tokens, session.batch.lengths,
        room=room, chunk=chunk, compress=compress, run=clock.prefill,
    )  # fmt: skip
    state = Decoding.begin(session, filled, room, log_probs)
    state, steps = clock.decode(_decode, params, state, logits, np.int32(max_new_tokens), sampler=sampler)
    lengths = np.asarray(state.lengths)
    longest = int(lengths.max())
    tokens = np.asarray(state.tokens)[:, :longest]
    rows = len(lengths)
    return Generation(
        tokens=tokens,
        lengths=lengths,
        text=None
        if tokenizer is None
        else [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(tokens, lengths, strict=True)],
        log_probs=None if state.log_probs is None else np.asarray(state.log_probs)[:, :longest],
        cache=state.cache,
        stats=Stats(
            prefill_seconds=clock.prefill_seconds,
            decode_seconds=clock.decode_seconds,
            compile_seconds=clock.compile_seconds,
            prompt_tokens=int(session.batch.lengths.sum()),
            new_tokens=int(lengths.sum()),
            decode_steps=int(steps),
            cache_bytes=state.cache.nbytes,
            full_cache_bytes=full_cache_bytes(params, int(np.asarray(state.cache.length).sum())),
            _rows=rows,
        ),
    )
