"""Joins softmaxes over two sets of entries into one, by their log-sum-exps, in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from .softmax import finite_or_zero

Attention = tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]  # the context and its log-sum-exp


def joined(one: Attention, other: Attention) -> Attention:
    """The softmax over the entries of both. It is exactly the one of them if the other saw nothing."""
    (out, lse), (other_out, other_lse) = one, other
    peak = jnp.maximum(lse, other_lse)
    finite = finite_or_zero(peak)
    share, other_share = jnp.exp(lse - finite), jnp.exp(other_lse - finite)
    total = share + other_share
    total = jnp.where(total == 0, 1.0, total)
    share, other_share = (x[..., None] / total[..., None] for x in (share, other_share))
    wide = out.astype(jnp.float32) * share + other_out.astype(jnp.float32) * other_share
    return wide.astype(out.dtype), peak + jnp.log(total)
