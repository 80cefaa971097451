"""`draw`: which positions of a text a cache retains, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from kvjax.checks import check_integers, index_of, installs, shown
from kvjax.kv_cache import KVCache, check_cache
from kvjax.mesh.sharding import fetch
from kvjax.request.request import check_tokenizer

from .recording import texts_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELS = 80  # positions whose texts have room in a picture


def draw(
    cache: KVCache,
    tokens: Int[np.ndarray, "N"] | Sequence[int] | None = None,
    *,
    tokenizer: Any = None,
    positions: range | None = None,
    row: int = 0,
) -> Figure:
    """Draws which positions of a row have an entry in each layer: the darker, the more kv heads retain the position.

    A notebook shows the figure that a cell ends with. `figure.savefig("retained.png")` writes it to a file. A text of
    more than 700 positions has several of them in a column, whose shade is their mean.

    Args:
        cache: the cache of `generate` or `prefill`.
        tokens: the ids of the row's tokens from the first one on, at least as many as the cache has seen. The learned
            tokens of `restorekv`, behind the prompt, count: give any ids for them. The picture has the texts in place
            of the numbers of positions.
        tokenizer: a transformers tokenizer, which gives the texts of `tokens`. Without it the texts are the ids.
        positions: the positions to draw, such as range(100, 160), of a row from 0 on. The default is all that the row
            has seen.
        row: the row of the batch.

    Raises:
        ValueError: for a value that is not accepted, and for `tokens` at more than MOST_LABELS positions.
        ModuleNotFoundError: if matplotlib is not installed, which the extra `plot` installs.
    """
    check_cache(cache)
    check_tokenizer(tokenizer)
    row = index_of("row", row, cache.batch_size)
    seen = int(fetch(cache.length)[row])
    if not seen:
        raise ValueError(f"row {row} of the cache has seen no token: expected a cache that has read a prompt")
    drawn = range(seen) if positions is None else positions
    if not isinstance(drawn, range) or drawn.step != 1 or not 0 <= drawn.start < drawn.stop <= seen:
        raise ValueError(f"positions={shown(positions)}: expected a range of step 1 within range(0, {seen})")
    texts = None if tokens is None else _texts(tokens, tokenizer, drawn, seen)
    try:
        from .figure import strip
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"draw: {error}; {installs('plot')}") from None
    heads = np.array([heads.number for heads in cache.entries.heads])
    shares = cache.retained_mask()[row, ..., drawn.start : drawn.stop].sum(axis=1) / heads[:, None]
    return strip(shares, drawn, texts, int(heads.max()))


def _texts(tokens: Any, tokenizer: Any, drawn: range, seen: int) -> list[str]:
    """The text of each position that is drawn; white space is spelled where it is all that a token has."""
    if len(drawn) > MOST_LABELS:
        raise ValueError(f"tokens at {len(drawn):,} positions: expected positions=range(...) of at most {MOST_LABELS}")
    check_integers("tokens", tokens)
    ids = np.asarray(tokens)
    if ids.ndim != 1 or len(ids) < seen:
        raise ValueError(f"tokens has the shape {ids.shape}: expected at least ({seen},), what the row has seen")
    texts = texts_of(ids.tolist(), tokenizer)[drawn.start : drawn.stop]
    return [text.strip() or repr(text)[1:-1] for text in texts]
