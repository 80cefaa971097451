"""Attention of a pass over a prompt's cache that can be differentiated by the pass's own queries, keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.models import AttentionLayer
from kvjax.pallas_kernels import capped, finite_or_zero, visible

from ..common.in_turns import in_turns

BLOCK = 64  # queries of each head whose weights are in memory at a time


def differentiable(
    layer: AttentionLayer,
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H W D"],
    v: Float[Array, "B H W D"],
    positions: Int[Array, "B W"],
    held: Slots,
) -> Float[Array, "B Hq W D"]:
    """Returns the context of the pass's queries, in XLA alone. Arguments are those of `Replay.attend`'s `instead`.

    The prompt's entries are constants. A storage that rounds the pass's own keys and values is differentiated as if it
    did not. No array has size W x M: backwards, the weights of each block of queries are computed once more.
    """
    B, Hq, W, D = q.shape
    H = k.shape[1]
    held = jax.lax.stop_gradient(held)
    past = held.slots - W
    keys = held.keys[:, :, :past], _as_stored(k, held.keys[:, :, past:])
    values = held.values[:, :, :past], _as_stored(v, held.values[:, :, past:])
    sinks = None if layer.sinks is None else layer.sinks.astype(jnp.float32).reshape(H, -1, 1)

    @jax.checkpoint
    def of_block(
        block: tuple[Float[Array, "B H G n D"], Int[Array, "B n"]],
    ) -> Float[Array, "B H G n D"]:
        rows, at = block
        logits = [jnp.einsum("BHGND,BHMD->BHGNM", rows, x, preferred_element_type=jnp.float32) for x in keys]
        together = capped(jnp.concatenate(logits, axis=-1) * layer.scale, layer.softcap)
        if held.bias is not None:
            together += held.bias[:, :, None, None]
        seen = visible(at, held.positions, layer.window)[:, :, None]
        together = jnp.where(seen, together, -jnp.inf)
        peak = jax.lax.stop_gradient(jnp.max(together, axis=-1))
        peak = finite_or_zero(peak)  # of padding, which sees nothing
        if sinks is not None:
            peak = jnp.maximum(peak, sinks)
        weights = jnp.exp(together - peak[..., None])
        total = jnp.sum(weights, axis=-1)
        total = jnp.where(total == 0, 1, total) if sinks is None else total + jnp.exp(sinks - peak)
        parts = jnp.split((weights / total[..., None]).astype(v.dtype), [past], axis=-1)
        before, own = (
            jnp.einsum("BHGNM,BHMD->BHGND", part, x, preferred_element_type=jnp.float32)
            for part, x in zip(parts, values, strict=True)
        )
        return (before + own).astype(v.dtype)

    n = min(BLOCK, W)
    padding = -W % n
    rows = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(B, H, Hq // H, -1, n, D)
    at = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1).reshape(B, -1, n)
    contexts = in_turns(of_block, (jnp.moveaxis(rows, 3, 0), jnp.moveaxis(at, 1, 0)))
    return jnp.moveaxis(contexts, 0, 3).reshape(B, Hq, W + padding, D)[:, :, :W]


def _as_stored(x: Float[Array, "B H W D"], stored: Float[Array, "B H W D"]) -> Float[Array, "B H W D"]:
    """Returns x as the cache stores it, with the gradient of x."""
    return x + jax.lax.stop_gradient(stored - x)
