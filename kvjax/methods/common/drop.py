"""The merge of methods that merge nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.policy import Merge


@dataclass(frozen=True)
class Drop(Merge):
    """Entries that are not retained are dropped."""
