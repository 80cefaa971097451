"""Entries as codes, some with more bits than others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import slot_attention

from .codes import STATIC, Codes, stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedEntries:
    """Entries of a prompt in parts, each with a number of bits of its own. Nothing is written to them any more.

    Keys are coded by channel: those of a part share a range for each channel. Values are coded by token (ZipCache,
    arXiv 2405.14256, section 4.1), after each channel has been divided by a divisor c_i = sqrt(max |v_i|), the largest
    of all entries of the head. No kernel reads codes: attention makes arrays of them, one layer at a time.

    Attributes:
        keys: of each part, T_i entries; [B, H, 1, D] ranges.
        values: likewise; [B, H, T_i, 1] ranges.
        divisors: of the channels of all values.
        positions: the token position of each entry, those of the first part first, int32, -1 where there is none.
        dtype: of keys and values as arrays.
    """

    keys: tuple[Codes, ...]
    values: tuple[Codes, ...]
    divisors: Float[Array, "B H 1 D"]
    positions: Int[Array, "B H T"]
    dtype: jnp.dtype = field(metadata=STATIC)

    @classmethod
    def of(cls, entries: Slots, parts: Sequence[tuple[int, Int[Array, "B H K"]]]) -> CodedEntries:
        """Encodes entries whose keys and values are arrays.

        Args:
            parts: the bits of each part, and the indices of its entries, -1 for none. Each entry is in one part.
        """
        dtype = entries.values.dtype
        real = (entries.positions >= 0)[..., None]
        largest = jnp.max(jnp.where(real, jnp.abs(entries.values.astype(jnp.float32)), 0), axis=2, keepdims=True)
        divisors = stored(jnp.sqrt(jnp.where(largest > 0, largest, 1)), dtype)
        keys, values, positions = [], [], []
        for bits, index in parts:
            part = entries.gather(index)
            real = (part.positions >= 0)[..., None]
            keys.append(Codes.of(part.keys, bits, 2, real, dtype))
            values.append(Codes.of(part.values / divisors, bits, 3, real, dtype))
            positions.append(part.positions)
        joined = jnp.concatenate(positions, axis=2)
        return cls(tuple(keys), tuple(values), divisors.astype(dtype), joined, jnp.dtype(dtype))

    def plain(self) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Returns keys and values as arrays, rounded once to their dtype."""
        keys = jnp.concatenate([part.numbers() for part in self.keys], axis=2)
        values = jnp.concatenate([part.numbers() for part in self.values], axis=2)
        return keys.astype(self.dtype), (values * self.divisors.astype(jnp.float32)).astype(self.dtype)

    def attention(
        self, q: Float[Array, "B Hq W D"], positions: Int[Array, "B W"], **logits: Any
    ) -> tuple[Float[Array, "B Hq W D"], Float[Array, "B Hq W"]]:
        """Computes `Settled.attention` over arrays."""
        # Without the barrier XLA makes arrays of all layers at the beginning of a step, and holds them.
        q, own = jax.lax.optimization_barrier((q, self))
        found = slot_attention(q, *own.plain(), positions, own.positions, **logits)
        return found.context, found.lse
