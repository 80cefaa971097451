"""Decides by positions alone which keys a query sees."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .arrays import pad


def visible(
    q_positions: Int[Array, "B W"], k_positions: Int[Array, "B H M"], window: int | None
) -> Bool[Array, "B H W M"]:
    """True where 0 <= p <= t and, with a sliding window, t - p < window."""
    t, p = q_positions[:, None, :, None], k_positions[:, :, None, :]
    seen = (p >= 0) & (p <= t)
    return seen if window is None else seen & (t - p < window)


def visible_tiles(
    t: Int[Array, "B rows"],
    p: Int[Array, "B H M"],
    *,
    rows: int,
    keys: int,
    window: int | None,
    causal: bool = True,
) -> Bool[Array, "B H tiles row_blocks"]:
    """Returns whether some row of a block of query rows may see some key of a tile of keys.

    Args:
        t: positions of the query rows; their number is a multiple of `rows`.
        rows: query rows per block.
        keys: keys per tile. The last tile may be shorter.
        causal: False if no key is newer than any query, so that positions need no comparison.
    """
    far = jnp.iinfo(jnp.int32).max
    t = t.reshape(t.shape[0], 1, 1, -1, rows)
    p = pad(p, -p.shape[-1] % keys, axis=2, value=-1).reshape(*p.shape[:2], -1, 1, keys)
    newest_t, newest_p = jnp.max(t, axis=-1), jnp.max(p, axis=-1)
    oldest_t, oldest_p = (jnp.min(jnp.where(x >= 0, x, far), axis=-1) for x in (t, p))
    seen = (newest_t >= 0) & (newest_p >= 0)
    if causal:
        seen &= newest_t >= oldest_p
    return seen if window is None else seen & (oldest_t - newest_p < window)


def span(x: Bool[Array, "... n"]) -> Int[Array, "... 2"]:
    """The index of the first true entry and the index after the last; both are 0 if no entry is true."""
    last = x.shape[-1] - jnp.argmax(x[..., ::-1], axis=-1)
    both = jnp.stack([jnp.argmax(x, axis=-1), last], axis=-1)
    return jnp.where(jnp.any(x, axis=-1, keepdims=True), both, 0).astype(jnp.int32)
