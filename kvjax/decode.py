"""The decoding loop: one state, one step, run in a jitted loop or one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import KVCache
from kvjax.extend import step
from kvjax.models import Decoder
from kvjax.sampling import SamplingMethod, log_probability, mark_seen
from kvjax.session import Session
from kvjax.spread import over_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """Answers under way.

    Attributes:
        active: rows that go on.
        tokens: of the answers, -1 where there is none yet. T bounds their length.
        lengths: of the answers.
        log_probs: of the tokens under the unmodified model, if asked for.
        seen: tokens of prompt and answer, if the sampler penalises repetition.
        keys: a PRNG key a row; a token's draw folds in its position.
        ends: end tokens of each row, -1 for none.
    """

    cache: KVCache
    active: Bool[Array, "B"]
    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    log_probs: Float[Array, "B T"] | None
    seen: Bool[Array, "B V"] | None
    keys: Array
    ends: Int[Array, "B E"]

    @classmethod
    def begin(cls, session: Session, cache: KVCache, *, size: int, log_probs: bool) -> Decoding:
        batch, put = cache.batch_size, jax.device_put if cache.mesh is None else cache.put_rows
        return cls(
            cache,
            active=put(np.ones(batch, bool)),
            tokens=put(np.full((batch, size), -1, np.int32)),
            lengths=put(np.zeros(batch, np.int32)),
            log_probs=put(np.zeros((batch, size), np.float32)) if log_probs else None,
            seen=None if session.seen is None else put(session.seen),
            keys=session.keys
            if cache.mesh is None
            else jax.random.wrap_key_data(put(jax.random.key_data(session.keys))),
            ends=put(session.ends),
        )

    def take(self, logits: Float[Array, "B V"], sampler: SamplingMethod) -> Decoding:
        """Samples each active row's next token, which is then pending."""
        rows = replace(self, cache=replace(self.cache, layers=(), pool=None))
        taken = over_rows(self.cache.mesh, partial(Decoding._take, sampler=sampler), rows, logits)
        return replace(taken, cache=replace(taken.cache, layers=self.cache.layers, pool=self.cache.pool))

    def _take(self, logits: Float[Array, "B V"], sampler: SamplingMethod) -> Decoding:
        """`take`, of a state whose cache's layers are left out."""
        cache = self.cache
        token = sampler(logits, jax.vmap(jax.random.fold_in)(self.keys, cache.length), self.seen)
        rows = jnp.arange(token.shape[0])
        column = jnp.where(self.active, self.lengths, self.tokens.shape[1])
        log_probs, seen = self.log_probs, self.seen
        if log_probs is not None:
            log_probs = log_probs.at[rows, column].set(log_probability(logits, token), mode="drop")
        if seen is not None:
            seen = mark_seen(seen, token[:, None], self.active[:, None])
        return replace(
            self,
            cache=replace(cache, pending=jnp.where(self.active, token, cache.pending)),
            active=self.active & ~jnp.any(token[:, None] == self.ends, axis=1),
            tokens=self.tokens.at[rows, column].set(token, mode="drop"),
            lengths=self.lengths + self.active,
            log_probs=log_probs,
            seen=seen,
        )

    def advance(self, params: Decoder, sampler: SamplingMethod) -> Decoding:
        """Decodes the pending token of each active row and samples the next one."""
        logits, cache = step(params, self.cache, self.cache.pending, self.active)
        return replace(self, cache=cache).take(logits, sampler)


take = jax.jit(Decoding.take, static_argnames="sampler", donate_argnums=0)


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def decode(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: Int[Array, ""], sampler: SamplingMethod
) -> tuple[Decoding, Int[Array, ""]]:
    """Answers of up to `limit` tokens, the first from the prompt's logits, and the steps it took to decode the rest."""

    def goes_on(carry: tuple[Decoding, Array]) -> Array:
        state, steps = carry
        return (steps + 1 < limit) & jnp.any(state.active)

    def body(carry: tuple[Decoding, Array]) -> tuple[Decoding, Array]:
        state, steps = carry
        return state.advance(params, sampler), steps + 1

    return jax.lax.while_loop(goes_on, body, (state.take(logits, sampler), jnp.int32(0)))
