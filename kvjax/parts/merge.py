"""What becomes of the entries that are not kept."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.protocols import Merge


@dataclass(frozen=True)
class Drop(Merge):
    """They are gone."""
