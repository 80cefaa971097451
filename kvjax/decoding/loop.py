"""The decoding loop: one state, one step, run inside a jitted loop or one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.attend import over_rows
from kvjax.decoding.row_guides import RowGuides
from kvjax.decoding.row_samplers import RowSamplers
from kvjax.decoding.sampling import SamplingMethod, log_probability, mark_seen, suppress
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import NONE_SUPPRESSED, Decoder, Suppressed
from kvjax.reading.layers import step
from kvjax.runtime.gpu_flags import STEP_OPTIONS
from kvjax.runtime.progress import call, tell

NOT_FINITE = -1  # the token of a row whose logits are not finite; no token has this id
SECONDS = 0.5  # of a part of the loop, if somebody watches it


def not_finite(row: int, position: int) -> FloatingPointError:
    """The error for logits that are not finite, from which no token can be drawn.

    Args:
        row: the row of the batch.
        position: the position of the token in the row, the prompt's tokens included.
    """
    return FloatingPointError(
        f"the logits of row {row} for the token at position {position} are not finite: expected finite numbers; the "
        'checkpoint is broken, or a number exceeds the dtype, which dtype="bfloat16" or "float32" may hold'
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """The arguments of sampling beside the logits.

    Attributes:
        sampler: draws the tokens: one sampler for all rows, or the settings of each row.
        ends: int32 end tokens of each row; -1 pads rows that have fewer than others.
        keys: one typed PRNG key per row. The draw of a token folds in its position.
        seen: marks the tokens of prompt and answer if the sampler penalises repetition, else None.
        suppressed: the tokens that are never drawn.
    """

    sampler: SamplingMethod | RowSamplers
    ends: Int[Any, "B E"]
    keys: Key[Array, "B"]
    seen: Bool[Any, "B V"] | None
    suppressed: Suppressed = field(default=NONE_SUPPRESSED, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Answers:
    """The answers of a batch while they are decoded. All arrays are small and have the batch as their first axis.

    Attributes:
        active: rows whose answer has not ended.
        tokens: int32 ids of the answers, -1 where there is no token yet. T bounds their length.
        lengths: int32, the number of tokens of each answer.
        log_probs: float32 log-probabilities of the tokens under the unmodified model, or None.
        sampling: how tokens are drawn.
    """

    active: Bool[Array, "B"]
    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    log_probs: Float[Array, "B T"] | None
    sampling: Sampling

    @classmethod
    def begin(
        cls, sampling: Sampling, *, size: int, log_probs: bool, put: Callable[[Any], Any] = jax.device_put
    ) -> Answers:
        """Returns answers without tokens.

        Args:
            size: the most tokens that an answer can have.
            log_probs: whether to record the log-probability of each token.
            put: places an array with the axes [B, ...] on the devices of these rows.
        """
        batch = len(sampling.ends)
        data, impl = jax.random.key_data(sampling.keys), jax.random.key_impl(sampling.keys)
        placed = replace(
            sampling,
            ends=put(sampling.ends),
            keys=jax.random.wrap_key_data(put(data), impl=impl),
            seen=None if sampling.seen is None else put(sampling.seen),
        )
        return cls(
            active=put(np.ones(batch, bool)),
            tokens=put(np.full((batch, size), -1, np.int32)),
            lengths=put(np.zeros(batch, np.int32)),
            log_probs=put(np.zeros((batch, size), np.float32)) if log_probs else None,
            sampling=placed,
        )

    def take(
        self,
        pending: Int[Array, "B"],
        logits: Float[Array, "B V"],
        positions: Int[Array, "B"],
        guides: RowGuides | None = None,
    ) -> tuple[Answers, Int[Array, "B"]]:
        """Samples the token at `positions` for each active row, and returns the new answers and pending tokens.

        Guides change the logits before the sampler does, if there are any.

        A row whose logits are not finite ends with the token NOT_FINITE. The host raises when it sees the token.
        """
        sampling, log_probs = self.sampling, self.log_probs
        finite = jnp.all(jnp.isfinite(logits), axis=1)
        allowed = suppress(logits, sampling.suppressed, self.lengths == 0)
        allowed = allowed if guides is None else guides(allowed)
        token = sampling.sampler(allowed, jax.vmap(jax.random.fold_in)(sampling.keys, positions), sampling.seen)
        token = jnp.where(finite, token, NOT_FINITE)
        rows = jnp.arange(token.shape[0])
        column = jnp.where(self.active, self.lengths, self.tokens.shape[1])
        if log_probs is not None:
            log_probs = log_probs.at[rows, column].set(log_probability(logits, token), mode="drop")
        if sampling.seen is not None:
            seen = mark_seen(sampling.seen, token[:, None], (self.active & finite)[:, None])
            sampling = replace(sampling, seen=seen)
        taken = replace(
            self,
            active=self.active & finite & ~jnp.any(token[:, None] == sampling.ends, axis=1),
            tokens=self.tokens.at[rows, column].set(token, mode="drop"),
            lengths=self.lengths + self.active,
            log_probs=log_probs,
            sampling=sampling,
        )
        return taken, jnp.where(self.active, token, pending)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """The state of the decoding loop: the cache, and the answers so far."""

    cache: KVCache
    answers: Answers

    @classmethod
    def begin(cls, sampling: Sampling | None, cache: KVCache, *, size: int, log_probs: bool) -> Decoding:
        """Returns the state after a prompt has been read into the cache, before the first token of the answers."""
        assert sampling is not None, "the request asks for no answer"
        put = jax.device_put if cache.mesh is None else cache.put_rows
        return cls(cache, Answers.begin(sampling, size=size, log_probs=log_probs, put=put))

    @property
    def active(self) -> Bool[Array, "B"]:
        return self.answers.active

    def with_active(self, active: Bool[Array, "B"]) -> Decoding:
        """Returns the same state with other active rows."""
        return replace(self, answers=replace(self.answers, active=active))

    def take(self, logits: Float[Array, "B V"], guides: RowGuides | None = None) -> Decoding:
        """Samples the next token of each active row, which becomes its pending token."""
        state, given = (self.answers, self.cache.pending), (logits, self.cache.length, guides)
        answers, pending = over_rows(self.cache.mesh, _take, state, given)
        return Decoding(replace(self.cache, pending=pending), answers)

    def advance(self, params: Decoder) -> Decoding:
        """Decodes the pending token of each active row and samples the next one."""
        logits, state = self.step(params)
        return state.take(logits)

    def step(self, params: Decoder) -> tuple[Float[Array, "B V"], Decoding]:
        """Decodes the pending token of each active row, and returns the logits of the next one."""
        logits, cache = step(params, self.cache, self.cache.pending, self.active)
        return logits, replace(self, cache=cache)


def _take(state: tuple[Answers, Array], given: tuple[Array, Array, RowGuides | None]) -> tuple[Answers, Array]:
    """Calls `Answers.take`. A device of a mesh calls it on its own rows."""
    answers, pending = state
    return answers.take(pending, *given)


take = jax.jit(Decoding.take, donate_argnums=0)


@partial(jax.jit, donate_argnames="state", compiler_options=STEP_OPTIONS)
def decode(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"] | None, limit: Int[Array, ""]
) -> tuple[Decoding, Int[Array, ""]]:
    """Decodes answers of up to `limit` tokens, the first of which is sampled from the prompt's logits.

    Args:
        logits: None if the first of these tokens has been sampled.

    Returns:
        The final state, and the number of decode steps after the first token.
    """

    def goes_on(carry: tuple[Decoding, Array]) -> Array:
        state, steps = carry
        return (steps + 1 < limit) & jnp.any(state.active)

    def body(carry: tuple[Decoding, Array]) -> tuple[Decoding, Array]:
        state, steps = carry
        return state.advance(params), steps + 1

    return jax.lax.while_loop(goes_on, body, (state if logits is None else state.take(logits), jnp.int32(0)))


def decode_in_parts(params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: int) -> Decoding:
    """Decodes as `decode` does, in parts of SECONDS, between which somebody is told how many tokens there are."""
    state, count, most = call(take, state, logits), 1, 1
    while True:
        tell("decoding", count, limit, "tokens")
        if count >= limit or not fetch(state.active).any():
            return state
        started = time.perf_counter()
        state, steps = call(decode, params, state, None, np.int32(min(most, limit - count) + 1))
        count += int(steps)
        most = max(1, int(SECONDS * int(steps) / (time.perf_counter() - started)))  # 1 after compiling


@partial(jax.jit, static_argnames="tree", donate_argnames="state", compiler_options=STEP_OPTIONS)
def advance(leaves: list[Array], state: Decoding, active: Array, tree: Any) -> Decoding:
    """Decodes one token of each active row. A call with a list of weights is faster than one with a module."""
    return state.with_active(active).advance(jax.tree.unflatten(tree, leaves))
