"""A pass over a prompt's cache that also runs backwards: how much it depends on what each layer's attention gave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attend import differentiable, over_heads
from kvjax.cache import Entries
from kvjax.kv_cache import KVCache
from kvjax.mesh.experts import over_experts
from kvjax.models import Attend, Decoder, densely, embedded


def replayed_backwards(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    observing: Callable[..., Attend],
) -> Entries:
    """The entries after their score has observed a pass with `Attended.sensitivity`.

    The pass runs forwards once, and the hidden states before each layer stay. From the last layer to the first, a layer
    then runs once more, is differentiated by its input and by what its attention gave, and is observed. Activations
    within a layer are those of one layer at a time. Where a layer that is differentiated has experts, each of them
    treats every token: the products of `over_experts` have no derivative.

    Args:
        tokens: of the pass, right-aligned.
        positions: of these tokens, -1 for padding.
        observing: the attention function by which the score observes a layer, given `sensitivity=`.
    """
    attend = over_heads(
        cache.mesh, partial(differentiable, cache.policy), hidden=False, positions=positions, rope=cache.rope
    )
    entries, mix = cache.entries, over_experts(cache.mesh)
    layers = list(zip(params.layers, params.attention_layers, strict=True))
    x, before = embedded(params.embed, tokens, params.config.embedding_scale), []
    for layer, record in layers:
        before.append(x)
        x, _ = layer(x, record, attend, cache.entries, mix)
    gradient = jnp.where(positions[..., None] >= 0, 2 * x, 0)  # of Phi
    for (layer, record), x in zip(reversed(layers), reversed(before), strict=True):
        # The barrier, and on a CPU the sum, keep XLA from holding what the layer computed on the way forwards.
        x, gradient = jax.lax.optimization_barrier((x + 0 * gradient, gradient))
        attending = partial(layer.attended, layer=record, attend=attend, cache=cache.entries)
        gradient, of_given = _backwards(layer, attending, x, gradient)
        sensitivity = jnp.linalg.norm(of_given.astype(jnp.float32), axis=-1)
        _, entries = layer.attended(x, record, observing(sensitivity=sensitivity), entries)
    return entries


def _backwards(
    layer: Any,
    attending: Callable[..., tuple[Array, Any]],
    x: Float[Array, "B W E"],
    gradient: Float[Array, "B W E"],
) -> tuple[Float[Array, "B W E"], Float[Array, "B W E"]]:
    """The gradients by the input of a layer and by its projected contexts, from that by what the layer returns.

    Args:
        attending: from the input, the contexts and entries, which are ignored.
    """
    given, by_attention = jax.vjp(lambda x: layer.attention.project_out(attending(x)[0]), x)
    _, by_rest = jax.vjp(lambda x, given: layer.after_attention(x, given, densely), x, given)
    of_x, of_given = by_rest(gradient)
    return of_x + by_attention(of_given)[0], of_given
