"""Which keys a query may see, by position alone."""

from __future__ import annotations

from jaxtyping import Array, Bool, Int


def visible(
    q_positions: Int[Array, "B W"], k_positions: Int[Array, "B H M"], window: int | None
) -> Bool[Array, "B H W M"]:
    """True where 0 <= p <= t and, with a sliding window, t - p < window."""
    t, p = q_positions[:, None, :, None], k_positions[:, :, None, :]
    seen = (p >= 0) & (p <= t)
    return seen if window is None else seen & (t - p < window)
