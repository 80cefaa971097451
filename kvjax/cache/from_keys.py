"""Values that their keys contain, as in attention over latents: a cache holds them once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.pallas_kernels import Stored, plain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FromKeys:
    """The stored form of values that are the channels of their keys from `first` on, behind zeros. It has no arrays.

        v = [0, k[first:]]

    Attributes:
        first: C, the number of channels of a key that are no part of the value: those that RoPE rotates.
    """

    first: int = field(metadata={"static": True})

    def of(self, keys: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """Returns the values of these keys."""
        return jnp.where(jnp.arange(keys.shape[-1]) < self.first, 0, keys)


Values: TypeAlias = Stored | FromKeys
"""Values as a cache stores them."""


def in_arrays(keys: Stored, values: Values) -> tuple[Array, Array]:
    """Returns stored keys and values as arrays of D channels."""
    keys = plain(keys)
    return keys, values.of(keys) if isinstance(values, FromKeys) else plain(values)


def for_attention(keys: Stored, values: Values) -> tuple[Stored, Stored]:
    """Returns stored keys and values as operations of attention take them.

    Values that keys contain are the keys themselves. The first channels of a context are then a mean of keys, which a
    model whose values are in its keys does not read.
    """
    return keys, keys if isinstance(values, FromKeys) else values
