"""Decoding with one program call per token, for text as it comes and for stop strings, which only the host finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.decoding.loop import NOT_FINITE, Decoding, advance, not_finite, take
from kvjax.decoding.row_text import RowText
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.runtime.progress import tell


class Decoded(NamedTuple):
    """The tokens and the text that one step adds to each row.

    Attributes:
        tokens: int32, one id per row, -1 where the row ended in an earlier step.
        text: the text that each row gains; None without texts.
        active: rows that continue after this step.
        state: after this step. The next step changes it in place.
    """

    tokens: Int[np.ndarray, "B"]
    text: list[str] | None
    active: Bool[np.ndarray, "B"]
    state: Decoding


def decode_each(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: int, texts: Sequence[RowText] | None
) -> Iterator[Decoded]:
    """Decodes answers of up to `limit` tokens, each up to its stop string, and yields after every token.

    Raises:
        FloatingPointError: if logits are NaN or infinite.
    """
    state = take(state, logits)
    active = np.ones(state.cache.batch_size, bool)
    # A call with a list of arrays takes a fraction of the time of a call with a module, which matters at every token.
    leaves, tree = jax.tree.flatten(params)
    for count in range(1, limit + 1):
        tell("decoding", count, limit, "tokens")
        pending = fetch(state.cache.pending)
        if (broken := active & (pending == NOT_FINITE)).any():
            row = int(np.argmax(broken))
            raise not_finite(row, int(fetch(state.cache.length)[row]))
        tokens = np.where(active, pending, -1)
        active = active & fetch(state.active) & (count < limit)
        pieces = None
        if texts is not None:
            pieces = [row.add(int(token), last=not on) for row, token, on in zip(texts, tokens, active, strict=True)]
            active &= [not row.stopped for row in texts]
        yield Decoded(tokens, pieces, active, state)
        if not active.any():
            return
        state = advance(leaves, state, state.cache.put_rows(active), tree=tree)


def decode_until(
    params: Decoder, state: Decoding, logits: Float[Array, "B V"], limit: int, texts: Sequence[RowText]
) -> tuple[Decoding, list[str]]:
    """Decodes answers of up to `limit` tokens, each up to its stop string.

    Returns:
        The final state, and the text of each row.
    """
    said = [""] * len(texts)
    for step in decode_each(params, state, logits, limit, texts):
        state, said = step.state, [all_of + new for all_of, new in zip(said, step.text or [], strict=True)]
    return state, said
