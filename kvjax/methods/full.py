"""Full cache (no paper): retains every entry, and is the reference that all other presets are compared with."""

from __future__ import annotations

from kvjax.policy import Policy

from .common.budgets import Everything
from .common.by_position import Recency
from .registry import preset


@preset
def full() -> Policy:
    """Retains everything: the cache grows with the text by one slot per token and kv head.

    No entry is scored or evicted.
    """
    return Policy(score=Recency(), budget=Everything())
