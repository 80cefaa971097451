"""Prompt attention in two parts: new tokens over themselves, by a library, and over cached slots, by a kernel."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from ..softmax import Attention, joined

LEAST_TOKENS = 1024  # from this number of new tokens on, the library saves more time than the join takes


def separable(q: Float[Array, "B Hq N D"], k: Float[Array, "B H M D"], bias: Float[Array, "B H M"] | None) -> bool:
    """Returns whether the new tokens get a call of their own: no bias, and no cached slots or enough new tokens."""
    return bias is None and (q.shape[2] == k.shape[2] or q.shape[2] >= LEAST_TOKENS)


def in_parts(
    own: Callable[..., Attention],
    cached: Callable[..., Attention],
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
) -> Attention:
    """Computes what the reference defines, without a bias.

    Args:
        own: attention of the new tokens over themselves, given q, k, v and the queries' positions.
        cached: attention over slots in any order, given those and the slots' positions. It is not called for M = N.
    """
    slots = k.shape[2] - q.shape[2]
    new = own(q, k[:, :, slots:], v[:, :, slots:], q_positions)
    if not slots:
        return new
    return joined(new, cached(q, k[:, :, :slots], v[:, :, :slots], q_positions, k_positions[..., :slots]))
