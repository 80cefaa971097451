"""What becomes of the entries that are not kept."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Bool, Float

from kvjax.cache import LayerCache


@dataclass(frozen=True)
class Drop:
    """They are gone."""

    def absorb(self, entries: LayerCache, scores: Float[Array, "B H M"], lost: Bool[Array, "B H M"]) -> LayerCache:
        return entries
