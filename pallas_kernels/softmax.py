"""The state of a softmax that is computed tile by tile (FlashAttention, arXiv 2205.14135), for the references."""

from __future__ import annotations

from typing import NamedTuple

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
