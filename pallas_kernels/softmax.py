"""A softmax that is computed tile by tile (FlashAttention, arXiv 2205.14135): its state, and its shift."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class RunningSoftmax(NamedTuple):
    """What the tiles so far have given to each query row.

    Attributes:
        out: the sum of values, weighted by exponentials and not yet divided by `total`.
        total: the sum of exp(logit - peak).
        peak: the largest logit; -inf if no tile had a visible entry.
    """

    out: Float[Array, "*heads R D"]
    total: Float[Array, "*heads R"]
    peak: Float[Array, "*heads R"]


def finite_or_zero(peak: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A peak, or 0 where it is -inf. Pallas kernels call it as well.

    `exp(logit - finite_or_zero(peak))` is then 0 for a query row that sees nothing, and not NaN.
    """
    return jnp.where(peak == -jnp.inf, 0.0, peak)
