"""ChunkKV (Liu et al., arXiv 2502.00299): what another policy scores, kept by whole chunks of text."""

from __future__ import annotations

from dataclasses import replace

from kvjax.parts import Chunks
from kvjax.policy import Policy

from .snapkv import snapkv

SNAPKV = snapkv()


def chunkkv(base: Policy = SNAPKV, length: int = 20) -> Policy:
    """Tokens of a chunk share its mean score, in all kv heads alike, so that what is kept can be read.

    score[c] = mean over kv heads h and tokens t of the chunk of c of the base's score[h, t]. What the base protects
    (the window of SnapKV) stays in any case, and does not count in the mean of its chunk. The budget is filled: the
    last chunk it has room for is cut where the room ends, where kvpress keeps whole chunks and fewer tokens. Each layer
    chooses for itself; the paper may also use the choice of one layer for the next ones.

    Decoding is the base's own: what is generated comes on top, or evicts single tokens by the base's scores.

    Args:
        base: the policy whose scores, budget and protected tokens these are.
        length: tokens to a chunk, counted from the beginning of the text (kvpress: 20).
    """
    return replace(base, select=Chunks(base.select, length))
