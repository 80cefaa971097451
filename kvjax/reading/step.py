"""A decode step: one token per row through all layers, in one program."""

from __future__ import annotations

from dataclasses import replace

import jax
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend import Stepping, in_array, runs_twice
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder

from .each_layer import Call, through_layers
from .units import by_row


def step(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B"], incoming: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by one token in the rows where one is incoming; the others stay as they are.

    Returns:
        Float32 logits after each row's token, and the new cache.
    """
    rows = {"positions": in_array(cache.length), "incoming": in_array(incoming), "rope": cache.rope}
    stepping = Stepping(cache.policy, cache.policy.limits(len(cache.entries)))
    call = Call(stepping, cache.mesh, doubled=runs_twice(cache.batch_size, cache.mesh))
    hidden, entries = through_layers(params, tokens[:, None], cache.entries, call, **rows)
    cache = replace(cache, entries=entries, length=cache.length + incoming)
    return by_row(params.logits(hidden[:, 0]), cache.mesh), cache.in_place()


jitted_step = jax.jit(step)
