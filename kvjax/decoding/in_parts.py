"""The decoding loop in parts of half a second, between which somebody is told how many tokens there are."""

from __future__ import annotations

import time

import numpy as np
from jaxtyping import Array, Float

from kvjax.decoding.loop import Decoding, decode, take
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.runtime.progress import call, tell

SECONDS = 0.5  # of a part


def decode_in_parts(params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: int) -> Decoding:
    """Decodes answers of up to `limit` tokens, as `decode` does, and returns the final state."""
    state, count, most = call(take, state, logits), 1, 1
    while True:
        tell("decoding", count, limit, "tokens")
        if count >= limit or not fetch(state.active).any():
            return state
        started = time.perf_counter()
        state, steps = call(decode, params, state, None, np.int32(min(most, limit - count) + 1))
        count += int(steps)
        most = max(1, int(SECONDS * int(steps) / (time.perf_counter() - started)))  # 1 after compiling
