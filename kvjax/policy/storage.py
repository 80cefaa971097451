"""Storages: the form in which a cache holds keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import Stored

from .part import Part
from .score import Attended, LayerShape


@dataclass(frozen=True)
class Storage(Part):
    """Holds keys and values as arrays; a subclass may encode them.

    A subclass encodes each token as it comes in (`store`), or it changes what is retained of a prompt after compression
    (`newest`, `init`, `observe`, `settle`).
    """

    def store(self, x: Float[Array, "*tokens D"]) -> Stored:
        """Returns the stored form: an array, or a pytree whose leaves have the same axes but the last one.

        Raises ValueError if it does not serve heads of D channels.
        """
        return x

    @property
    def newest(self) -> int | None:
        """The number of a prompt's newest entries that `settle` leaves as they are; None if it changes none."""
        return None

    def init(self, shape: LayerShape) -> Any:
        """Returns the storage's state in a layer until a prompt has been read, axes [B, H, ...] or [B, Hq, ...]."""
        return None

    def observe(self, entries: Slots, attended: Attended) -> Any:
        """Returns the new state after queries attended to `entries`, which hold the old one, `Slots.storing`.

        It is called while a prompt is read. `attended.received` is None.
        """
        return entries.storing

    def settle(self, entries: Slots, **logits: Any) -> Slots:
        """Returns the entries of a prompt that has been read and compressed, in the form in which they stay.

        Args:
            logits: of the layer, as `AttentionLayer.logits` has them.
        """
        return entries


PLAIN = Storage()
"""Holds keys and values as arrays."""
