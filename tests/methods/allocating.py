"""Prompts that are read once and then allocated under several policies, which differ in what they allocate alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from kvjax.cache import Layers
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.reading.allocate import allocated
from kvjax.reading.replays import encoded_texts, replayed
from tests import tiny


def read(params: Decoder, policy: Policy, rows: Sequence[np.ndarray], size: int) -> KVCache:
    """All tokens of the rows, after the passes of the policy's score."""
    _, cache = tiny.prefill(params, policy, list(rows), size, compress="never")
    texts = encoded_texts(policy, None)
    return replayed(params, cache, *map(jnp.asarray, tiny.left_pad(list(rows), size)), texts)


def reallocated(params: Decoder, cache: KVCache, policy: Policy, size: int) -> KVCache:
    """What a policy whose score has the same state retains of a cache of `read`."""
    own = tiny.empty(params, policy, np.asarray(cache.length), size)
    entries = Layers(
        tuple(replace(layer, capacity=new.capacity) for layer, new in zip(cache.entries, own.entries, strict=True))
    )
    return allocated(params, replace(own, entries=entries, length=cache.length), room=8, begins=True)
