"""Which keys a query may see, by position alone."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .tiling import pad


def visible(
    q_positions: Int[Array, "B W"], k_positions: Int[Array, "B H M"], window: int | None
) -> Bool[Array, "B H W M"]:
    """True where 0 <= p <= t and, with a sliding window, t - p < window."""
    t, p = q_positions[:, None, :, None], k_positions[:, :, None, :]
    seen = (p >= 0) & (p <= t)
    return seen if window is None else seen & (t - p < window)


def sees(
    t: Int[Array, "B R"],
    p: Int[Array, "B H M"],
    *,
    rows: int,
    keys: int,
    window: int | None,
    causal: bool = True,
) -> Bool[Array, "B H tiles row_blocks"]:
    """Whether a block of `rows` may see something of a tile of `keys`; `t` fills whole blocks."""
    far = jnp.iinfo(jnp.int32).max
    t = t.reshape(t.shape[0], 1, 1, -1, rows)
    p = pad(p, -p.shape[-1] % keys, axis=2, value=-1).reshape(*p.shape[:2], -1, 1, keys)
    newest_t, newest_p = jnp.max(t, axis=-1), jnp.max(p, axis=-1)
    oldest_t, oldest_p = (jnp.min(jnp.where(x >= 0, x, far), axis=-1) for x in (t, p))
    seen = (newest_t >= 0) & (newest_p >= 0)
    if causal:
        seen &= newest_t >= oldest_p
    return seen if window is None else seen & (oldest_t - newest_p < window)


def ends(x: Bool[Array, "... n"]) -> Int[Array, "... 2"]:
    """The index of the first true entry and the one after the last; equal where there is none."""
    last = x.shape[-1] - jnp.argmax(x[..., ::-1], axis=-1)
    both = jnp.stack([jnp.argmax(x, axis=-1), last], axis=-1)
    return jnp.where(jnp.any(x, axis=-1, keepdims=True), both, 0).astype(jnp.int32)
