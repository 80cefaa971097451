"""The uncompressed cache."""

from __future__ import annotations

from kvjax.policy import Policy

from .common.budgets import Everything
from .common.by_position import Recency
from .registry import preset


@preset
def full() -> Policy:
    """Retains everything: the cache grows with the text by one slot per token and kv head."""
    return Policy(score=Recency(), budget=Everything())
