"""Decoding up to stop strings, which only the host finds: one program call per token."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from kvjax.decoding.loop import Decoding, advance, take
from kvjax.decoding.row_text import RowText
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder


def decode_until(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: int, texts: Sequence[RowText]
) -> tuple[Decoding, list[str]]:
    """Decodes answers of up to `limit` tokens, each up to its stop string.

    Returns:
        The final state, and the text of each row.
    """
    state = take(state, logits)
    active, said = np.ones(len(texts), bool), [""] * len(texts)
    leaves, tree = jax.tree.flatten(params)
    for count in range(1, limit + 1):
        tokens = np.where(active, fetch(state.cache.pending), -1)
        goes_on = active & fetch(state.active) & (count < limit)
        for row, text in enumerate(texts):
            said[row] += text.add(int(tokens[row]), last=not goes_on[row])
        active = goes_on & [not text.stopped for text in texts]
        if not active.any():
            break
        state = advance(leaves, state, state.cache.put_rows(active), tree=tree)
    return state, said
