"""A pass over a prompt's cache that also runs backwards, to the gradients by each layer's attention output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Entries
from kvjax.models import densely, of_layer
from kvjax.policy import Replay

from .differentiable import differentiable


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
