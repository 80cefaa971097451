"""The decoder as it is written: all tokens at once, without a cache."""

import jax
import jax.numpy as jnp

from kvjax.attend.causal import causal
from kvjax.mesh.experts import over_experts
from kvjax.models import Decoder


@jax.jit
def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
    attend = causal(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    hidden, _ = params(tokens, attend, mix=over_experts(None))
    return params.logits(hidden)
