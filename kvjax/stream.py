"""Generating token by token: the same steps as `generate`, one program call each, with what they add as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int
from tokenizers.decoders import DecodeStream

from kvjax.cache import KVCache
from kvjax.decode import Decoding, take
from kvjax.extend import Compress, read_prompt
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.prompts import Prompt
from kvjax.sampling import SamplingMethod
from kvjax.session import EndTokens, Session, room_for
from kvjax.sharding import fetch


@dataclass(frozen=True)
class Piece:
    """What one step adds to each row.

    Attributes:
        tokens: one id a row, -1 where the row has ended before.
        text: what can be said of it already, if there was a tokenizer: a text that may turn out to be the beginning of
            a character or of a stop string is held back until it is known not to be.
        active: rows that go on after this step.
        cache: to go on with, in the last piece; None before.
    """

    tokens: Int[np.ndarray, "B"]
    text: list[str] | None
    active: Bool[np.ndarray, "B"]
    cache: KVCache | None = None


def stream(
    params: Decoder,
    prompt: Prompt | None,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    sampler: SamplingMethod | None = None,
    seed: int | Sequence[int] = 0,
    eos: EndTokens = None,
    stop: str | Sequence[str] = (),
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    compress: Compress = "auto",
) -> Iterator[Piece]:
    """Yields the answers of `generate` piece by piece; the arguments are the same, but for one.

    Args:
        stop: strings that end a row. They are not part of its text, though their tokens are in the cache. They need a
            tokenizer.

    Raises:
        ValueError: at the call, before anything is compiled.
    """
    stops = [stop] if isinstance(stop, str) else list(stop)
    if stops and tokenizer is None:
        raise ValueError("stop strings are compared with text and need tokenizer=")
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={stop!r}; accepted are strings of a character or more")
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
    return _pieces(params, session, max_new_tokens, stops, tokenizer, chunk, compress)


def _pieces(
    params: Decoder,
    session: Session,
    max_new_tokens: int,
    stops: list[str],
    tokenizer: Any,
    chunk: int | None,
    compress: Compress,
) -> Iterator[Piece]:
    logits, filled = read_prompt(
        params,
        session.cache,
        session.batch.tokens,
        session.batch.lengths,
        room=room_for(max_new_tokens),
        chunk=chunk,
        compress=compress,
        texts=session.texts,
    )
    state = take(Decoding.begin(session, filled, size=0, log_probs=False), logits, sampler=session.sampler)
    batch = len(session.batch.lengths)
    texts = None if tokenizer is None else [RowText(tokenizer, stops) for _ in range(batch)]
    active = np.ones(batch, bool)
    # A call with a list of arrays takes a fraction of the time of one with a module: it matters at every token.
    leaves, tree = jax.tree.flatten(params)
    for count in range(1, max_new_tokens + 1):
        tokens = np.where(active, fetch(state.cache.pending), -1)
        after = active & fetch(state.active)
        if count == max_new_tokens:
            after = np.zeros_like(after)
        pieces = None
        if texts is not None:
            pieces = [row.add(int(token), last=not on) for row, token, on in zip(texts, tokens, after, strict=True)]
            after &= [not row.stopped for row in texts]
        active = after
        if not active.any():
            yield Piece(tokens, pieces, active, state.cache)
            return
        yield Piece(tokens, pieces, active)
        state = _advance(leaves, state, state.cache.put_rows(active), tree=tree, sampler=session.sampler)


@partial(jax.jit, static_argnames=("tree", "sampler"), donate_argnames="state")
def _advance(leaves: list[Array], state: Decoding, active: Array, tree: Any, sampler: SamplingMethod) -> Decoding:
    return replace(state, active=active).advance(jax.tree.unflatten(tree, leaves), sampler)


class RowText:
    """The text of one row as it grows, cut before the first stop string."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._tokens: list[int] = []
        self._decoded = ""
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool) -> str:
        """The text that is certain after another token (-1: none), all of what was held back if it is the last."""
        if token < 0 or self.stopped:
            return ""
        self._tokens.append(token)
        text = self._decoder.step(self._tokenizer, token) or ""
        self._decoded += text
        if last:  # bytes that did not become a character show as the tokenizer shows them
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            text += whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = 0 if last else max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of what is held may be the beginning of a stop string."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
