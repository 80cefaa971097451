"""The uncompressed cache."""

from __future__ import annotations

from kvjax.parts import Drop, Everything, Recency, TopTokens
from kvjax.policy import Policy


def full() -> Policy:
    """Keeps everything: the cache grows with the text, one slot a token and kv head."""
    return Policy(score=Recency(), budget=Everything(), select=TopTokens(), merge=Drop())
