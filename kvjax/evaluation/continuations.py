"""Scores continuations of prompts: their log-probabilities, and whether greedy decoding generates them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.decoding.sampling import most_probable
from kvjax.extend import extend
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder


def marks(logits: Float[Array, "B V"], targets: Int[Array, "B"]) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """The log-probability of each target, and whether it is the most probable token."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]
    return chosen, most_probable(logits) == targets


@jax.jit
def score(
    params: Decoder, cache: KVCache, inputs: Int[Array, "B T"], targets: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """Decodes B rows of T tokens; sums the log-probabilities of the targets and checks whether all are greedy.

    Args:
        params: the model.
        cache: the cache of the contexts, with room for T tokens.
        inputs: the tokens to decode, int32.
        targets: the token that should follow each input, int32.
        lengths: the number of valid tokens of each row; a row of length 0 has a sum of 0 and counts as greedy.
    """

    def step(
        state: tuple[KVCache, Float[Array, "B"], Bool[Array, "B"]], t: Int[Array, ""]
    ) -> tuple[tuple[KVCache, Float[Array, "B"], Bool[Array, "B"]], None]:
        cache, total, greedy = state
        live = t < lengths
        logits, cache = extend(params, cache, inputs[:, t][:, None], live.astype(jnp.int32))
        one, same = marks(logits, targets[:, t])
        return (cache, total + jnp.where(live, one, 0), greedy & (same | ~live)), None

    start = (cache, jnp.zeros(inputs.shape[0]), jnp.ones(inputs.shape[0], bool))
    (_, total, greedy), _ = jax.lax.scan(step, start, jnp.arange(inputs.shape[1]))
    return total, greedy
