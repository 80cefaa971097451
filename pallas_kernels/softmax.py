"""Shared parts of softmaxes: the cap of logits, the state of one computed tile by tile, and joins of several.

The state and the joins follow FlashAttention (arXiv 2205.14135), in plain XLA. Pallas kernels call the short functions
as well.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Attention = tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]  # the context and its log-sum-exp


class RunningSoftmax(NamedTuple):
    """The sums that the tiles so far have given to each query row.

    Attributes:
        out: the sum of values, weighted by exponentials and not yet divided by `total`.
        total: the sum of exp(logit - peak).
        peak: the largest logit; -inf if no tile had a visible entry.
    """

    out: Float[Array, "*heads R D"]
    total: Float[Array, "*heads R"]
    peak: Float[Array, "*heads R"]


def capped(logits: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """Returns softcap * tanh(logits / softcap): the scaled logits before any bias, in (-softcap, softcap).

    It is the soft cap of Gemma 2 (arXiv 2408.00118), which all kernels and references share.
    """
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def finite_or_zero(peak: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A peak, or 0 where it is -inf.

    `exp(logit - finite_or_zero(peak))` is then 0 for a query row that sees nothing, and not NaN.
    """
    return jnp.where(peak == -jnp.inf, 0.0, peak)


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
