"""A pass over a prompt's cache that also runs backwards, to the gradients by each layer's attention output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Entries, Slots
from kvjax.models import AttentionLayer, densely, of_layer
from kvjax.pallas_kernels import capped, finite_or_zero, visible
from kvjax.policy import Replay

from ..common.in_turns import in_turns


def backwards(replay: Replay) -> Entries:
    """Returns the entries after their score has observed a pass, with |d Phi / d y_t| for `Attended.measured`.

    The pass runs forwards once, and the hidden states before each layer stay. From the last layer to the first, a layer
    then runs once more, is differentiated by its input and by its attention's output, and is observed. Activations
    within a layer are those of one layer at a time. Where a layer that is differentiated has experts, each of them
    treats every token: the products of `Replay.mix` have no derivative.
    """
    attend, entries = replay.attend(instead=differentiable), replay.entries
    x, before, first = replay.hidden, [], []

    def recur(i: int, x: Float[Array, "B W E"], mix: Any) -> Float[Array, "B W E"]:
        return replay.layers[i][0].recur(x, replay.lengths, replay.recurrent[i], mix)[0]

    for i, (layer, record) in enumerate(replay.layers):
        first.append(x)
        x = recur(i, x, replay.mix)
        before.append(x)
        x, _ = layer(x, record, attend, entries.of_layers(i, 1), replay.mix, of_layer(replay.given, i))
    gradient = jnp.where(replay.positions[..., None] >= 0, 2 * x, 0)  # of Phi
    for i, (layer, record) in reversed(list(enumerate(replay.layers))):
        # The barrier, and on a CPU the sum, keep XLA from holding what the layer computed on the way forwards.
        x, gradient = jax.lax.optimization_barrier((before[i] + 0 * gradient, gradient))
        attending = partial(layer.attended, layer=record, attend=attend, cache=entries.of_layers(i, 1))
        gradient, of_added = _backwards(layer, attending, x, gradient, of_layer(replay.given, i))
        sensitivity = jnp.linalg.norm(of_added.astype(jnp.float32), axis=-1)
        _, part = layer.attended(x, record, replay.attend(measured=sensitivity), entries.of_layers(i, 1))
        entries = entries.with_layers(i, part)
        if len(layer.before):
            _, into = jax.vjp(partial(recur, i, mix=densely), first[i])
            (gradient,) = into(gradient)
    return entries


def _backwards(
    layer: Any,
    attending: Callable[..., tuple[Array, Any]],
    x: Float[Array, "B W E"],
    gradient: Float[Array, "B W E"],
    own: Float[Array, "B W P"] | None,
) -> tuple[Float[Array, "B W E"], Float[Array, "B W E"]]:
    """Returns the gradients by a layer's input and by its projected contexts, from the gradient by its output.

    Args:
        attending: from the input, the contexts and entries, which are ignored.
        own: the inputs of this layer beside the hidden states, where layers have them.
    """
    added, by_attention = jax.vjp(lambda x: layer.attention.project_out(attending(x)[0]), x)
    _, by_rest = jax.vjp(lambda x, added: layer.after_attention(x, added, densely, own), x, added)
    of_x, of_added = by_rest(gradient)
    return of_x + by_attention(of_added)[0], of_added


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
