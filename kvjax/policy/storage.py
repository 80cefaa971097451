"""Storages: the form in which a cache holds keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from kvjax.pallas_kernels import Stored

from .part import Part


@dataclass(frozen=True)
class Storage(Part):
    """Holds keys and values as arrays; a subclass may encode them."""

    def store(self, x: Float[Array, "*tokens D"]) -> Stored:
        """The stored form: an array, or a pytree whose leaves have the same axes but the last one.

        Raises ValueError if it does not serve heads of D channels.
        """
        return x


PLAIN = Storage()
