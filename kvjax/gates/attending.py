"""Attention with plain arrays for the training of learned tokens: differentiable, and over any entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend.positions import rotated
from kvjax.models import Attend, AttentionLayer
from kvjax.pallas_kernels import capped


def behind(
    at: Int[Array, "B W"],
    keys: Float[Array, "B H M D"],
    values: Float[Array, "B H M D"],
    of: Int[Array, "B M"],
    held: Bool[Array, "B H M"] | None = None,
) -> Attend:
    """Computes attention of tokens over entries before them and, causally, over themselves.

    In place of a cache it returns the weights [B, Hq, W, M + W], and the tokens' own rotated keys and their values.

    Args:
        at: the positions of the tokens.
        keys: rotated.
        of: the positions of the entries.
        held: the entries that there are, None for all.
    """

    def attend(
        layer: AttentionLayer,
        q: Float[Array, "B Hq W D"],
        k: Float[Array, "B H W D"],
        v: Float[Array, "B H W D"],
        cache: Any,
    ) -> tuple[Float[Array, "B Hq W D"], Any]:
        B, H, W, _ = k.shape
        queries, own = turned(layer, layer.rope.grown(q, at), at), turned(layer, k, at)
        there = None if held is None else jnp.concatenate([held, jnp.ones((B, H, W), bool)], axis=2)
        positions = jnp.concatenate([of, at], axis=1)
        found = weights(layer, queries, jnp.concatenate([keys, own], axis=2), at, positions, there)
        grouped = found.astype(v.dtype).reshape(B, H, -1, *found.shape[2:])
        context = jnp.einsum("BHGWM,BHMD->BHGWD", grouped, jnp.concatenate([values, v], axis=2))
        return context.reshape(q.shape), (found, own, v)

    return attend


def turned(layer: AttentionLayer, x: Float[Array, "B H N D"], positions: Int[Array, "B N"]) -> Float[Array, "B H N D"]:
    """Rotates queries or keys to their positions."""
    rope = layer.rope.row_frequencies(x.shape[-1], jnp.max(positions, axis=1) + 1)
    return rotated(layer, x, positions[:, None], rope)


def weights(
    layer: AttentionLayer,
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    at: Int[Array, "B W"],
    of: Int[Array, "B M"],
    held: Bool[Array, "B H M"] | None = None,
) -> Float[Array, "B Hq W M"]:
    """The float32 attention weights of rotated queries at some positions on rotated keys of others.

    Args:
        held: the keys that there are, None for all.
    """
    B, Hq, W, D = q.shape
    H = k.shape[1]
    grouped = q.reshape(B, H, -1, W, D)
    logits = jnp.einsum("BHGWD,BHMD->BHGWM", grouped, k, preferred_element_type=jnp.float32)
    distance = at[:, :, None] - of[:, None]
    visible = ((distance >= 0) & (distance < (layer.window or jnp.inf)))[:, None, None]
    if held is not None:
        visible = visible & held[:, :, None, None]
    logits = jnp.where(visible, capped(logits * layer.scale, layer.softcap), -jnp.inf).reshape(B, Hq, W, -1)
    if layer.sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    sinks = jnp.broadcast_to(layer.sinks.astype(jnp.float32)[:, None, None], (B, Hq, W, 1))
    return jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
